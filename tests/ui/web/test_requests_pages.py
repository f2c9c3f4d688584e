"""Requests without scripts: a replay by its form, and a log that cannot be read."""

import re
import sqlite3

import httpx

from support.cli_box import PATIENCE, until


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
    token = re.search(r'name="csrf_token" value="([^"]+)"', page)
    assert token is not None
    path = f"/admin/requests/{answer['id']}/replay"
    assert signed_in.post(path).status_code == 403, "a change without the session's token"
    replayed = signed_in.post(path, data={"csrf_token": token[1]})
    assert "Equal: the same 5 tokens." in replayed.text
    assert "<h1>Replay</h1>" in replayed.text
    unknown = signed_in.post("/admin/requests/nobody/replay", data={"csrf_token": token[1]})
    assert unknown.status_code == 404


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


def test_an_error_explains_itself_and_names_the_fix(panel, signed_in):
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 10_000_000}
    asked = httpx.post(f"{panel.url}/v1/completions", json=body, timeout=PATIENCE)
    assert asked.status_code == 400
    until(lambda: panel.box.api("requests?errors=true")["requests"])
    row = panel.box.api("requests?errors=true")["requests"][0]
    page = signed_in.get(f"/admin/requests/{row['id']}").text
    assert "longer than the model&#39;s context" in page
    assert '<a href="/admin/models">Shorten the prompt' in page
