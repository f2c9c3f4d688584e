"""Pulls that are killed, and deletions and loads that cross them: resumed, serialized, never ready early."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbox.app.errors import CliError, Exit
from llmbox.app.models.catalog import resolve
from support.cli_box import Box, box, until
from support.hub_models import model_files
from support.hub_stub import StubHub, StubRepo, stub_hub

__all__ = ["box"]

NAME = "org/little"


@pytest.fixture
def hub(box: Box) -> Iterator[StubHub]:
    with stub_hub() as stub:
        stub.repos[NAME] = StubRepo(model_files(shards=True))
        box.environ |= {"HF_ENDPOINT": stub.url, "LLMBOX_SERVER_MODELS": str(box.model())}
        yield stub


def is_whole(box: Box, hub: StubHub) -> bool:
    """Whether it can be resolved; if so every file of it must be right."""
    try:
        ref = resolve(NAME, {"HF_HOME": str(box.folder / "hf")})
    except CliError:
        return False
    for file in ref.path.iterdir():
        assert file.read_bytes() == hub.repos[NAME].files[file.name]
    assert {"config.json", "tokenizer.json"} <= {file.name for file in ref.path.iterdir()}
    assert len(list(ref.path.glob("*.safetensors"))) == 2
    return True


def test_kill_9_again_and_again(box: Box, hub: StubHub):
    """At random moments: at once, in the middle, and about the time when the snapshot appears."""
    hub.chunk_pause = 0.02
    draw = random.Random(7)
    client = box.client
    box.serve()
    assert box.run("pull", NAME, "--no-wait").code == 0
    for _ in range(4):
        share = draw.random()

        def reached(share: float = share) -> bool:
            rows = box.api("downloads")["downloads"]
            return (
                not rows or rows[0]["state"] == "ready" or rows[0]["done"] > share * (rows[0]["total"] or 9e9)
            )

        until(reached)
        running = box.running
        assert running is not None
        os.kill(running.pid, signal.SIGKILL)
        until(lambda: not client.is_up())
        is_whole(box, hub)
        box.serve()
    until(lambda: is_whole(box, hub))
    cache = box.folder / "hf" / "hub"
    until(lambda: not list(cache.rglob("*.incomplete")))
    assert not list(cache.rglob(".llmbox-*"))


def test_pull_load_and_delete_at_once_have_defined_answers(box: Box, hub: StubHub):
    hub.chunk_pause = 0.01
    box.serve()
    results: list[tuple[str, int]] = []

    def run(*arguments: str) -> None:
        results.append((arguments[0], box.run(*arguments).code))

    for _ in range(2):
        threads = [
            threading.Thread(target=run, args=arguments)
            for arguments in (("pull", NAME), ("rm", NAME, "--yes"), ("load", NAME), ("pull", NAME))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    known = {
        "pull": {0, Exit.FAILED},
        "rm": {0, Exit.NOT_FOUND, Exit.CONFLICT},
        "load": {0, Exit.NOT_FOUND, Exit.CONFLICT, Exit.FAILED},
    }
    assert all(code in known[command] for command, code in results), results
    assert box.run("pull", NAME).code == 0
    assert is_whole(box, hub)
    assert box.run("load", NAME).code == 0
    assert box.run("rm", NAME, "--yes").code == Exit.CONFLICT
    assert Path(box.run("show", NAME, "--json").json["path"]).is_dir()
