"""Codex, OpenAI's coding agent: its own program against a daemon whose model's answers are known."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.cli_box import Box, box
from support.npm_package import npm_program
from support.scripted_model import TEMPLATE, call, events, run, serve

__all__ = ["box"]

VERSION = "0.171.0"
THINKING = TEMPLATE + "{#- </think> -#}"
"""The template of a model that thinks."""
PATCH = "*** Begin Patch\n*** Add File: made.txt\n+ZQ2\n*** End Patch\n"
CATALOG = {
    "slug": "scripted",
    "display_name": "scripted",
    "description": "",
    "supported_reasoning_levels": [],
    "shell_type": "unified_exec",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 0,
    "apply_patch_tool_type": "freeform",
    "context_window": 200_000,
    "max_context_window": 200_000,
    "input_modalities": ["text"],
    "base_instructions": "You are a coding agent.",
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "support_verbosity": False,
    "supports_parallel_tool_calls": True,
    "experimental_supported_tools": [],
}
"""What Codex knows of a model: this one is shown the tool for patches."""


@pytest.fixture(scope="module")
def codex() -> Path:
    return npm_program("@openai/codex", VERSION, "codex")


def ask(codex: Path, box: Box, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Return its events, and what it writes to stderr."""
    home = box.folder / "codex"
    home.mkdir()
    environ = {"CODEX_HOME": str(home), "HOME": str(box.folder)}
    written = box.run("connect", "codex", "--write", **environ)
    assert written.code == 0, written.err
    command = [str(codex), "exec", "--skip-git-repo-check", "--json", *options, "Do the task QZ0"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    done = run(command, box.folder / "work", {**inherited, **environ})
    return events(done.stdout), done.stderr


def test_a_turn_with_a_command_and_a_final_answer(codex: Path, box: Box) -> None:
    echo = call("exec_command", {"cmd": "echo ZQ$((3 * 7))"})
    serve(box, [("ZQ21", "All done, ZQ9.")], f"<think>\nZQ3\n</think>\n\nI will look.\n{echo}", THINKING)
    said, _ = ask(codex, box)
    items = [each["item"] for each in said if each["type"] == "item.completed"]
    command = next(each for each in items if each["type"] == "command_execution")
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, "ZQ21")
    assert [each["text"] for each in items if each["type"] == "agent_message"] == [
        "I will look.",
        "All done, ZQ9.",
    ]
    usage = next(each["usage"] for each in said if each["type"] == "turn.completed")
    assert usage["input_tokens"] > 1000
    assert usage["output_tokens"] > 10


def test_custom_tools_and_tools_in_namespaces(codex: Path, box: Box) -> None:
    """`apply_patch` takes a text that follows its grammar; models of a catalog of one's own are shown it."""
    close = call("multi_agent_v1__close_agent", {"target": "ZQ5"})
    patch = call("apply_patch", {"input": PATCH})
    replies = [("made.txt\n", "The file is there, ZQ9."), ("invalid agent id", patch)]
    serve(box, replies, close, THINKING)
    catalog = box.folder / "catalog.json"
    catalog.write_text(json.dumps({"models": [CATALOG]}))
    options = ["-c", f'model_catalog_json="{catalog}"', "--sandbox", "danger-full-access"]
    said, err = ask(codex, box, *options)
    items = [each["item"] for each in said if each["type"] == "item.completed"]
    assert items[-1].get("text") == "The file is there, ZQ9.", (items, err[-2000:])
    assert "invalid agent id ZQ5" in err  # so it ran the tool of that namespace
    assert (box.folder / "work" / "made.txt").read_text() == "ZQ2\n"
    assert any(each["type"] == "file_change" for each in items)
