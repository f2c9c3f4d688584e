"""Qwen Code, Alibaba's coding agent: its own program against a daemon whose model's answers are known."""

import os
from pathlib import Path

import pytest

from support.cli_box import Box, box
from support.npm_package import npm_program
from support.scripted_model import call, run, serve

__all__ = ["box"]

VERSION = "0.24.4"


@pytest.fixture(scope="module")
def qwen() -> Path:
    return npm_program("@qwen-code/qwen-code", VERSION, "qwen", quicker="Pi")


@pytest.mark.parametrize("context", [80_000, 200_000])
def test_a_turn_with_a_command_and_a_final_answer(qwen: Path, box: Box, context: int) -> None:
    echo = call("run_shell_command", {"command": "echo ZQ$((3 * 7))", "is_background": False})
    serve(box, [("ZQ21", "All done, ZQ9.")], f"I will look.\n{echo}", context=context)
    environ = {"HOME": str(box.folder)}
    written = box.run("connect", "qwen", "--write", **environ)
    assert written.code == 0, written.err
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    command = [str(qwen), "--yolo", "--prompt", "Do the task QZ0"]
    said = run(command, box.folder / "work", {**inherited, **environ}).stdout
    assert said.splitlines()[-1] == "All done, ZQ9."
