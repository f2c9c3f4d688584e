"""Requests without scripts: a replay by its form, and a log that cannot be read."""

import re
import shlex
import sqlite3
from itertools import pairwise
from types import SimpleNamespace

import click
import httpx
import pytest

from llmbox.app.cli.root import cli
from llmbox.app.config.settings import schema
from llmbox.app.http.admin.schema import ModelStatus
from llmbox.app.models.catalog import BUILTIN_DIR
from llmbox.app.store.record import RequestRecord
from llmbox.ui.web import panel_routes
from llmbox.ui.web.pages.request_help import HELP
from support.cli_box import PATIENCE, until

PATHS = {route.path for route in panel_routes[0].routes}


def test_a_replay_works_without_scripts(panel, signed_in):
    secret = panel.box.run("key", "add", "open", "--log-content").out.strip()
    answer = httpx.post(
        f"{panel.url}/v1/completions",
        json={"model": "tiny", "prompt": "hello", "max_tokens": 5},
        headers={"Authorization": f"Bearer {secret}"},
        timeout=PATIENCE,
    ).json()
    until(lambda: answer["id"] in {row["id"] for row in panel.box.api("requests")["requests"]})
    page = signed_in.get(f"/admin/requests/{answer['id']}").text
    assert "Where its time went" in page
    assert re.search(r'<rect class="engine" x="0.00" width="[0-9.]+" height="4"/>', page)
    shares = re.findall(r'<rect class="[a-z]+" x="([0-9.]+)" width="([0-9.]+)" height="4"/></svg></td>', page)
    assert len(shares) >= 3
    for (begin, share), (after, _) in pairwise(shares):
        assert float(begin) <= float(after) <= float(begin) + float(share) + 0.02, (
            "each begins where one ends"
        )
    token = re.search(r'name="csrf_token" value="([^"]+)"', page)
    assert token is not None
    path = f"/admin/requests/{answer['id']}/replay"
    assert signed_in.post(path).status_code == 403, "a change without the session's token"
    replayed = signed_in.post(path, data={"csrf_token": token[1]})
    assert "Equal: the same 5 tokens." in replayed.text
    assert "<h1>Replay</h1>" in replayed.text
    unknown = signed_in.post("/admin/requests/nobody/replay", data={"csrf_token": token[1]})
    assert unknown.status_code == 404


def test_accepted_drafts_are_shown_by_the_page_and_the_command(panel, signed_in):
    panel.complete()
    until(lambda: panel.box.api("requests")["requests"])
    id_ = panel.box.api("requests")["requests"][0]["id"]
    with sqlite3.connect(panel.box.paths.request_db, timeout=30) as other:
        other.execute("UPDATE request SET draft_tokens = 40, accepted_tokens = 30 WHERE id = ?", (id_,))
    other.close()
    page = signed_in.get(f"/admin/requests/{id_}").text
    assert "<dt>Drafts accepted</dt><dd>30 <small>of 40, 75 %</small></dd>" in page
    told = panel.box.run("requests", "show", id_).out
    assert re.search(r"^draft_tokens +40$", told, re.MULTILINE)
    assert re.search(r"^accepted_tokens +30$", told, re.MULTILINE)


def test_what_runs_is_shown_while_the_log_cannot_be_read(panel, signed_in):
    panel.complete()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    other = sqlite3.connect(panel.box.paths.request_db, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        with httpx.stream("POST", f"{panel.url}/v1/completions", json=body, timeout=300):
            page = signed_in.get("/admin/requests")
            assert page.status_code == 200
            assert "The request log cannot be read now: " in page.text
            assert "Cancel</button>" in page.text
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert "cannot be read now" not in signed_in.get("/admin/requests").text


def test_the_history_comes_over_the_stream_as_its_filters_say(panel, signed_in):
    def seen(query: str, wanted: str) -> str:
        """What the piece `history` holds once `wanted` is in it."""
        with signed_in.stream("GET", f"/admin/live/requests?{query}") as stream:
            name = ""
            for line in stream.iter_lines():
                name = line.removeprefix("event: ") if line.startswith("event: ") else name
                if name == "history" and wanted in line:
                    return line
        raise AssertionError("the stream ended")

    panel.complete()
    newest = panel.box.api("requests?limit=1")["requests"][0]["id"]
    assert seen("model=tiny", newest)
    assert seen("model=nobody", "No request matches.")
    assert seen("before=1", "No requests yet")
    assert signed_in.get("/admin/live/requests?since=soon").status_code == 400


def test_who_signed_in_with_a_key_takes_no_copy_of_what_others_asked(panel):
    secret = panel.box.run("key", "add", "boss", "--scope", "admin").out.strip()
    with panel.client() as client:
        assert client.post("/admin/signin", data={"key": secret}).status_code == 200
        token = re.search(r'name="csrf_token" value="([^"]+)"', client.get("/admin/system").text)
        assert token is not None
        refused = client.post("/admin/system/backup", data={"csrf_token": token[1]})
        assert refused.status_code == 403
        assert "prompts and answers of other keys" in refused.text


def test_requests_are_sorted_summed_and_chosen_from_lists(panel, signed_in):
    for length in (3, 9, 5):
        panel.complete(length)
    for _ in range(2):
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 10_000_000}
        httpx.post(f"{panel.url}/v1/completions", json=body, timeout=PATIENCE)
    until(lambda: len(panel.box.api("requests?errors=true&model=tiny")["requests"]) >= 2)
    page = signed_in.get("/admin/requests?sort=output&model=tiny").text
    rows = page.partition('sse-swap="history"')[2]
    outputs = [int(text) for text in re.findall(r'data-label="output">(\d+)', rows)]
    assert outputs == sorted(outputs, reverse=True)
    assert 'aria-sort="descending"><a href="/admin/requests?model=tiny&amp;sort=output"' in page
    totals = page.partition('class="legend totals"')[2].partition("</dl>")[0]
    assert f"<dt>Tokens out</dt><dd>{sum(outputs):,}</dd>" in totals
    everything = signed_in.get("/admin/requests.json?model=tiny").json()["requests"]
    errors = sum(row["error_code"] != "" for row in everything)
    assert re.search(rf"<dt>With errors</dt><dd[^>]*>{errors} <small>", totals)
    assert "<option selected>tiny</option>" in page
    assert signed_in.get("/admin/requests?sort=nonsense").status_code == 200


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words call, and what is left of them."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, words
        command, words = found, words[1:]
    return command, words


def some_model(state: str = "ready", *, pinned: bool = False, context: int = 1024) -> ModelStatus:
    info = SimpleNamespace(context_window=context)
    return ModelStatus(
        name="my model",
        aliases=[],
        state=state,
        cause="",
        path=str(BUILTIN_DIR),
        ref="org/my",
        chat=True,
        options={},
        info=info,
        pinned=pinned,
    )


@pytest.mark.parametrize("code", HELP)
def test_each_remedy_is_a_form_a_page_or_a_command_that_exists(code: str):
    for model in (None, some_model(), some_model("failed"), some_model(pinned=True)):
        for key in ("", "my key"):
            check_remedies(code, model, key)


def check_remedies(code: str, model: ModelStatus | None, key: str):
    record = RequestRecord(
        id="r", created=0.0, model="my model", endpoint="/v1", http_status=400, key=key, error_code=code
    )
    for each in HELP[code].remedies(record, model):
        assert [bool(each.route), bool(each.page), bool(each.command)].count(True) == 1, each
        assert each.label or each.command
        if each.page:
            path, _, query = each.page.partition("?")
            path, _, place = path.partition("#")
            assert path in PATHS, path
            assert path != "/admin/settings" or place in schema()
            assert query.count(" ") == 0
        elif each.route:
            assert each.route in PATHS
            assert "model" in each.fields
        for call in each.command.split(" && ") if each.command else ():
            words = shlex.split(call)
            assert words.pop(0) == "llmbox"
            command, left = command_of(words)
            flags = {flag for option in command.params for flag in option.opts}
            assert {word for word in left if word.startswith("-")} <= flags, call
            if words[:2] == ["config", "set"]:
                assert words[2] in schema()


def test_a_model_that_left_memory_is_loaded_and_one_that_is_there_is_pinned():
    record = RequestRecord(
        id="r", created=0.0, model="my model", endpoint="/v1", http_status=503, error_code="model_evicted"
    )
    load, command = HELP["model_evicted"].remedies(record, None)
    assert (load.route, load.fields) == ("/admin/models/load", {"model": "my model"})
    assert command.command == "llmbox load 'my model'"
    pin, _ = HELP["model_evicted"].remedies(record, some_model())
    assert (pin.route, pin.fields) == ("/admin/models/pin", {"model": "my model", "pinned": "1"})
    assert HELP["model_evicted"].remedies(record, some_model(pinned=True)) == []


def test_a_longer_context_is_offered_up_to_the_models_own():
    record = RequestRecord(id="r", created=0.0, model="my model", endpoint="/v1", http_status=400)
    lengthen = HELP["context_length_exceeded"].remedies
    assert lengthen(record, some_model(context=1024))[0].page.endswith("ctx=2048")
    assert lengthen(record, some_model(context=3000))[0].page.endswith("ctx=4096")
    (other,) = lengthen(record, some_model(context=4096))
    assert other.page == "/admin/models/discover"


def test_a_failed_request_says_what_helps_with_a_button_and_a_command(panel, signed_in):
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1_000_000}
    refused = httpx.post(f"{panel.url}/v1/completions", json=body, timeout=PATIENCE)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    rows = panel.box.api("requests?limit=5")["requests"]
    until(lambda: "context_length_exceeded" in signed_in.get("/admin/requests").text)
    rows = panel.box.api("requests?limit=5")["requests"]
    id_ = next(row["id"] for row in rows if row["error_code"] == "context_length_exceeded")
    assert (
        f'href="/admin/requests/{id_}#help" title="Prompt and answer together'
        in signed_in.get("/admin/requests").text
    )
    page = signed_in.get(f"/admin/requests/{id_}").text
    assert re.search(
        r'<a class="button" href="[^"]+">(Plan [\d,]+ tokens of|Find a model with a longer) context', page
    )
    unknown = httpx.post(f"{panel.url}/v1/completions", json={**body, "model": "org/none"}, timeout=PATIENCE)
    assert unknown.status_code == 404
    until(lambda: "org/none" in signed_in.get("/admin/requests?status=404").text)
    id_ = next(
        row["id"] for row in panel.box.api("requests?limit=5")["requests"] if row["http_status"] == 404
    )
    page = signed_in.get(f"/admin/requests/{id_}").text
    assert "llmbox pull org/none" in page
    assert "/admin/models/discover?text=org%2Fnone" in page
