"""`llmbox requests` and what it can do with one request, against a daemon with the fake engine."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmbox.app.errors import Exit
from support.cli_box import PATIENCE, Box, interrupt, until

SAID = "mombasa-said"


class Place:
    def __init__(self, box: Box) -> None:
        self.box = box
        box.serve(box.model())
        self.secret = box.run("key", "add", "open", "--log-content").out.strip()
        self.quiet = box.run("key", "add", "quiet").out.strip()

    def ask(self, secret: str, text: str = SAID, **options: Any) -> Any:
        body = {"model": "tiny", "prompt": text, "max_tokens": 8, "ignore_eos": True, **options}
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
            timeout=PATIENCE,
        ).json()
        if "id" in answer:
            until(lambda: answer["id"] in {row["id"] for row in self.box.api("requests")["requests"]})
        return answer

    @property
    def url(self) -> str:
        assert self.box.running is not None
        return self.box.running.url


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    box = Box(tmp_path_factory.mktemp("requests"))
    try:
        yield Place(box)
    finally:
        box.close()


def test_show_tells_prompt_answer_and_what_the_cache_had(place: Place):
    answer = place.ask(place.secret)
    shown = place.box.run("requests", "show", answer["id"])
    assert shown.code == 0
    assert SAID in shown.out
    assert "\nAnswer\n" in shown.out
    told = place.box.run("requests", "show", answer["id"], "--json").json
    assert told["content"]["prompts"] == [SAID]
    assert told["content"]["outputs"] == [answer["choices"][0]["text"]]
    assert told["content_note"] == ""
    assert told["request"]["output_hash"] != ""


def test_show_says_why_there_is_no_content(place: Place):
    for secret, why in ((place.quiet, "The key quiet does not let"), ("", "requests.log_content")):
        answer = place.ask(secret)
        assert why in place.box.run("requests", "show", answer["id"]).out


def test_a_request_as_curl_and_as_python_gives_the_same_answer(place: Place, tmp_path: Path):
    answer = place.ask(place.secret, n=2, top_k=5, stop=["zz", "it's"])
    texts = [choice["text"] for choice in answer["choices"]]
    curl = place.box.run("requests", "show", answer["id"], "--curl").out
    environ = {"PATH": "/usr/bin:/bin", "LLMBOX_API_KEY": place.secret}
    done = subprocess.run(
        ["bash", "-c", curl], capture_output=True, env=environ, check=True, timeout=PATIENCE
    )
    assert [choice["text"] for choice in json.loads(done.stdout)["choices"]] == texts
    program = place.box.run("requests", "show", answer["id"], "--python").out
    file = tmp_path / "again.py"
    file.write_text(program + "\nprint([choice.text for choice in answer.choices])\n")
    done = subprocess.run(
        [place.box.command()[0], str(file)],
        capture_output=True,
        env={**place.box.environ, **environ},
        check=True,
        timeout=300,
    )
    assert done.stdout.decode().strip() == repr(texts)


def test_a_call_without_content_marks_where_the_prompt_goes(place: Place):
    answer = place.ask(place.quiet, temperature=0.5)
    curl = place.box.run("requests", "show", answer["id"], "--curl").out
    assert SAID not in curl
    assert '"prompt": "…"' in curl
    assert '"temperature": 0.5' in curl


def test_replay_says_equal_and_is_logged(place: Place):
    answer = place.ask(place.secret, seed=5)
    replayed = place.box.run("requests", "replay", answer["id"])
    assert (replayed.code, replayed.out) == (0, "Equal: the same 8 tokens.\n")
    told = place.box.run("requests", "replay", answer["id"], "--json")
    assert told.json["schema"] == "llmbox.replay/1"
    assert told.json["equal"] is True


def test_replay_without_content_says_what_to_do(place: Place):
    answer = place.ask(place.quiet)
    refused = place.box.run("requests", "replay", answer["id"])
    assert refused.code == Exit.CONFLICT
    assert "key add --log-content" in refused.err
    assert place.box.run("requests", "replay", "nobody").code == Exit.NOT_FOUND


def test_filters_and_follow(place: Place):
    mine, other = place.ask(place.secret), place.ask(place.quiet)
    assert place.box.run("requests", "--key", "open", "-q").out.split()[-1] == mine["id"]
    following = place.box.spawn("requests", "-f", "-q", "--key", "quiet", "--limit", "1")
    assert following.stdout is not None
    assert following.stdout.readline().strip() == other["id"]
    place.ask(place.secret)
    place.ask(place.quiet, max_tokens=10**6)
    refused = following.stdout.readline().strip()
    last = place.ask(place.quiet)
    assert following.stdout.readline().strip() == last["id"]
    interrupt(following)
    following.communicate(timeout=PATIENCE)
    errors = place.box.run("requests", "--errors", "--json").json["requests"]
    assert [row["id"] for row in errors] == [refused]


def test_following_with_json_gives_rows_of_one_shape(place: Place):
    place.ask(place.secret)
    following = place.box.spawn("requests", "-f", "--json", "--limit", "1")
    assert following.stdout is not None
    first = json.loads(following.stdout.readline())
    place.ask(place.secret)
    second = json.loads(following.stdout.readline())
    following.kill()
    assert first["schema"] == second["schema"] == "llmbox.request/1"
    assert first["request"].keys() == second["request"].keys()


def test_another_admin_key_gets_the_numbers_but_not_the_words(place: Place):
    answer = place.ask(place.secret)
    admin = place.box.run("key", "add", "boss", "--scope", "admin").out.strip()
    told = httpx.get(
        f"{place.url}/admin/api/requests/{answer['id']}",
        headers={"Authorization": f"Bearer {admin}"},
        timeout=PATIENCE,
    )
    assert SAID not in told.text
    assert "another API key" in told.json()["content_note"]
    assert told.json()["request"]["output_tokens"] == 8
    mine = httpx.get(
        f"{place.url}/admin/api/requests/{answer['id']}",
        headers={"Authorization": f"Bearer {place.secret}"},
        timeout=PATIENCE,
    )
    assert mine.status_code == 403
    place.box.run("key", "rm", "boss", "--yes")


def test_purge_asks_and_erases(place: Place):
    place.ask(place.secret, "to-be-forgotten")
    refused = place.box.run("requests", "purge")
    assert refused.code == Exit.USAGE
    assert "--yes" in refused.err
    assert (
        place.box.run("requests", "purge", "--older-than", "1", "--yes").err
        == "Erased 0: requests and stored answers.\n"
    )
    some = place.box.run("requests", "purge", "--content", "--yes", "--json").json["purged"]
    assert some >= 1
    assert place.box.api("requests")["requests"] != []
    assert b"to-be-forgotten" not in everything(place.box.paths.data_dir)
    assert place.box.run("requests", "purge", "--yes").code == 0
    assert place.box.api("requests")["requests"] == []


def answers_at_once(place: Place) -> bool:
    started = time.monotonic()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    assert httpx.post(f"{place.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
    return time.monotonic() - started < 4


def everything(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_log_that_cannot_be_read_is_said_and_serving_goes_on(place: Place):
    import sqlite3

    place.ask(place.secret)
    with sqlite3.connect(place.box.paths.request_db, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        until(lambda: answers_at_once(place))  # one wait for the lock takes 5 s, a busy machine as long
        told = place.box.run("requests")
        assert (told.code, told.out) == (1, "")
        assert "request log cannot be read now: (sqlite3.OperationalError) database is locked" in told.err
        assert "cannot be used now" in place.box.run("requests", "show", "absent").err
        other.execute("ROLLBACK")
    assert place.box.run("requests").code == 0


def test_stored_answers_are_counted_and_go_with_a_purge_or_their_key(place: Place):
    owner = place.box.run("key", "add", "keeper").out.strip()

    def store() -> None:
        answer = httpx.post(
            f"{place.url}/v1/responses",
            json={"model": "tiny", "input": SAID, "store": True, "max_output_tokens": 4},
            headers={"Authorization": f"Bearer {owner}"},
            timeout=PATIENCE,
        )
        assert answer.json()["store"] is True

    def stored() -> list[tuple[str, str, int]]:
        rows = place.box.run("requests", "stored", "--json").json["stored"]
        return [(row["key"], row["kind"], row["answers"]) for row in rows]

    store()
    assert stored() == [("keeper", "response", 1)]
    table = place.box.run("requests", "stored").out
    assert "keeper" in table
    assert SAID not in table
    assert place.box.run("requests", "purge", "--stored", "--yes").err == "Erased 1: stored answers.\n"
    assert stored() == []
    store()
    assert place.box.run("key", "rm", "keeper", "--yes").code == 0
    assert stored() == []
    assert place.box.run("requests", "stored").err == "Nothing is stored.\n"


def test_why_splits_the_time_of_a_request(place: Place):
    answer = place.ask("")
    told = place.box.run("why", answer["id"], "--json").json
    assert told["schema"] == "llmbox.why/1"
    assert sum(row["seconds"] for row in told["rows"]) == pytest.approx(told["total_s"], rel=0.02)
    shown = place.box.run("why")
    assert answer["id"] in shown.out
    assert "In the engine, which told no times" in shown.out  # the fake engine has no ledger


def test_why_says_what_is_missing(place: Place):
    unknown = place.box.run("why", "cmpl-nobody")
    assert unknown.code == Exit.NOT_FOUND
    assert "No request 'cmpl-nobody' is known" in unknown.err
    httpx.post(
        f"{place.url}/v1/completions",
        json={"model": "nope", "prompt": "hello"},
        headers={"X-Request-Id": "refused-1"},
    )
    until(lambda: "refused-1" in place.box.run("requests", "-q").out)
    refused = place.box.run("why", "refused-1")
    assert "it was refused before it reached an engine" in refused.err
