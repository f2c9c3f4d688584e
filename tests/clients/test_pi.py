"""Pi, an open coding agent: its own program against a daemon whose model's answers are known."""

import os
from pathlib import Path

import pytest

from support.cli_box import Box, box
from support.npm_package import npm_program
from support.scripted_model import call, events, run, serve

__all__ = ["box"]

VERSION = "0.73.1"


@pytest.fixture(scope="module")
def pi() -> Path:
    return npm_program("@mariozechner/pi-coding-agent", VERSION, "pi")


@pytest.mark.parametrize("context", [40_000, 200_000])
def test_a_turn_with_a_command_and_a_final_answer(pi: Path, box: Box, context: int) -> None:
    echo = call("bash", {"command": "echo ZQ$((3 * 7))"})
    serve(box, [("ZQ21", "All done, ZQ9.")], f"I will look.\n{echo}", context=context)
    environ = {"HOME": str(box.folder), "PI_TELEMETRY": "0", "PI_OFFLINE": "1"}
    written = box.run("connect", "pi", "--write", **environ)
    assert written.code == 0, written.err
    command = [str(pi), "--print", "--mode", "json", "--model", "llmbox/scripted", "Do the task QZ0"]
    said = events(run(command, box.folder / "work", {**os.environ, **environ}).stdout)
    messages = [each["message"] for each in said if each["type"] == "message_end"]
    texts = [part["text"] for each in messages for part in each["content"] if part["type"] == "text"]
    assert texts[-1] == "All done, ZQ9."
    assert any("ZQ21" in text for text in texts)
