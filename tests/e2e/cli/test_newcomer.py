"""From nothing to a loaded model, a chat and a live view, with the commands of the README alone.

The hub is a stub and the engine the fake one; everything between them and the terminal is real.
"""

import os
import pty
import re
import select
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbox.app.errors import CliError
from support.cli_box import PATIENCE, Box, box, until
from support.hub_models import model_files
from support.hub_stub import StubHub, StubRepo, stub_hub

__all__ = ["box"]

README = Path(__file__).parents[3] / "README.md"
HUB_NAME = "Qwen/Qwen3-0.6B"
"""What the README pulls."""


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with stub_hub() as stub:
        stub.repos[HUB_NAME] = StubRepo(model_files())
        yield stub


def commands() -> list[str]:
    """The README's `$ llmbox …` lines, comments taken off."""
    lines = re.findall(r"^\$ llmbox (.+)$", README.read_text("utf-8"), re.MULTILINE)
    return [line.partition("  #")[0].strip() for line in lines]


def test_the_readme_has_the_whole_way():
    first = [line.split()[0] for line in commands()]
    assert first.index("up") < first.index("fit") < first.index("pull") < first.index("load")
    assert {"run", "ps", "top", "requests", "down"} <= set(first)


def test_from_nothing_to_a_chat_and_a_live_view(box: Box, hub: StubHub):
    box.environ["HF_ENDPOINT"] = hub.url
    done = box.run("up")
    assert done.code == 0, done.err
    links = re.findall(r"http://\S+", done.out)
    with urllib.request.urlopen(links[1], timeout=PATIENCE) as page:
        assert "Sign in" in page.read().decode()
    assert box.run("run", "builtin", "What is a KV cache?").out.strip()
    for line in commands():
        words = line.split()
        if words[0] in {"fit", "pull", "load", "ps"}:
            done = box.run(*words)
            assert done.code == 0, (line, done.err)
    assert HUB_NAME in box.run("ps", "-q").out.split()
    answer = box.run("run", HUB_NAME, "Hello")
    assert answer.code == 0, answer.err
    assert answer.out
    assert HUB_NAME in watched(box)
    rows = box.run("requests", "--json").json["requests"]
    assert {row["model"] for row in rows} == {"builtin", HUB_NAME}
    assert box.run("down").code == 0
    assert box.run("status").code == 3


def watched(box: Box) -> str:
    """What `llmbox top` draws until the model's name is there, in a terminal of its own."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        box.command("top"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**box.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(theirs)
    shown = ""
    deadline = time.monotonic() + PATIENCE
    os.write(ours, b"3")
    while HUB_NAME not in shown and time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            shown += os.read(ours, 65_536).decode("utf-8", "replace")
        else:
            os.write(ours, b"3")
    os.write(ours, b"q")
    end = time.monotonic() + PATIENCE
    while child.poll() is None and time.monotonic() < end:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                os.read(ours, 65_536)
            except OSError:
                break
    if child.poll() is None:
        child.send_signal(signal.SIGKILL)
    until(lambda: child.poll() is not None)
    os.close(ours)
    return shown


def test_run_fetches_a_model_by_its_short_name_and_chats(box: Box, hub: StubHub):
    box.environ["HF_ENDPOINT"] = hub.url
    refused = box.run("run", "qwen3:0.6b", "Hello")
    assert refused.code == 4
    assert "not on this disk" in refused.err
    assert "llmbox pull Qwen/Qwen3-0.6B" in refused.err
    done = box.run("run", "--yes", "qwen3:0.6b", "Hello")
    assert done.code == 0, done.err
    assert re.search(r"Fetching Qwen/Qwen3-0\.6B: .*, about .* at 10\.0 MB/s", done.err)
    assert done.out
    again = box.run("run", "qwen3:0.6b", "Hello")
    assert again.code == 0, again.err
    assert "Fetching" not in again.err
    body = {"model": "qwen3:0.6b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert box.client.post("/v1/chat/completions", body)["choices"]
    assert HUB_NAME in box.run("ps", "-q").out.split()


def test_the_list_of_recommended_models_is_refreshed_from_the_hub_on_request(box: Box, hub: StubHub):
    box.environ["HF_ENDPOINT"] = hub.url
    before = {row["name"]: row for row in box.run("search", "--json").json["models"]}
    assert not hub.seen
    done = box.run("search", "--refresh", "--json")
    assert done.code == 0, done.err
    assert "1 of " in done.err
    after = {row["name"]: row for row in done.json["models"]}
    assert after["qwen3:0.6b"]["download_bytes"] < 1_000_000 < before["qwen3:0.6b"]["download_bytes"]
    assert after["qwen3:4b"] == before["qwen3:4b"]


def test_llmbox_alone_says_where_one_is_and_what_comes_next(box: Box):
    before = box.run()
    assert before.code == 0
    assert "The daemon is not running" in before.out
    assert "llmbox search" in before.out
    assert re.search(r"llmbox run \S+ +(quick|balanced|best|smallest): fetch", before.out)
    assert box.run("up", "builtin").code == 0
    after = box.run()
    assert "Models in memory: builtin" in after.out
    assert "llmbox top" in after.out
    sections = re.findall(r"^([A-Z][^:]+):$", box.run("--help").out, re.MULTILINE)
    assert sections[:3] == ["Options", "Getting started", "Models"]


def test_a_request_fetches_a_recommended_model_where_the_owner_allows_it(box: Box, hub: StubHub):
    box.environ["HF_ENDPOINT"] = hub.url
    assert box.run("up", "builtin").code == 0
    body = {"model": "qwen3:0.6b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}

    def ask(**more: str) -> str:
        try:
            box.client.post("/v1/chat/completions", {**body, **more})
        except CliError as error:
            return error.what + error.why
        return "answered"

    assert "does not exist" in ask()
    assert not hub.requests("hub", "Qwen")
    assert box.run("config", "set", "hub.pull_on_request", "recommended").code == 0
    os.kill(box.client.get("/admin/api/status")["pid"], signal.SIGHUP)
    until(lambda: "being fetched" in ask())
    assert "does not exist" in ask(model="org/other")
    until(lambda: ask() == "answered")
    assert HUB_NAME in box.run("ps", "-q").out.split()
