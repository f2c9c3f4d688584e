"""opencode, an open coding agent: its own program against a daemon whose model's answers are known."""

import os
from pathlib import Path

import pytest

from support.cli_box import Box, box
from support.npm_package import npm_program
from support.scripted_model import call, events, run, serve

__all__ = ["box"]

VERSION = "1.18.33"


@pytest.fixture(scope="module")
def opencode() -> Path:
    return npm_program("opencode-ai", VERSION, "opencode", quicker="Pi")


def ask(opencode: Path, box: Box) -> list[str]:
    """Return the texts that it prints."""
    folders = {f"XDG_{name}_HOME": str(box.folder / name) for name in ("CONFIG", "DATA", "STATE", "CACHE")}
    environ = {**folders, "HOME": str(box.folder), "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    written = box.run("connect", "opencode", "--write", **environ)
    assert written.code == 0, written.err
    command = [str(opencode), "run", "--format", "json", "--model", "llmbox/scripted", "Do the task QZ0"]
    said = events(run(command, box.folder / "work", {**os.environ, **environ}).stdout)
    return [each["part"]["text"] for each in said if each["type"] == "text"]


def test_a_turn_with_a_command_and_a_final_answer(opencode: Path, box: Box) -> None:
    echo = call("bash", {"command": "echo ZQ$((3 * 7))", "description": "Count"})
    serve(box, [("ZQ21", "All done, ZQ9.")], f"I will look.\n{echo}")
    assert ask(opencode, box) == ["I will look.", "All done, ZQ9."]


def test_a_window_smaller_than_the_answers_that_it_requests(opencode: Path, box: Box) -> None:
    """It requests 32,000 tokens of output unless it is told what a model takes."""
    serve(box, [], "All done, ZQ9.", context=40_000)
    assert ask(opencode, box) == ["All done, ZQ9."]
