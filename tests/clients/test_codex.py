"""Codex, OpenAI's coding agent: its own program against a daemon whose model's answers are known."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from support.cli_box import Box, box
from support.fake_engine import write_model
from support.npm_package import npm_program
from support.tokenizers_zoo import byte_level, drawn_ids, write_text_files

__all__ = ["box"]

VERSION = "0.169.0"
TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}{#- </think> -#}"
)
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


def call(name: str, arguments: dict[str, object]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def codex() -> Path:
    return npm_program("@openai/codex", VERSION, "codex")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def serve(box: Box, replies: list[tuple[str, str]], answer: str) -> None:
    """A model called `scripted`: the first of `replies` whose mark stands in the prompt, else `answer`."""
    tokenizer = byte_level()

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    folder = write_text_files(box.folder / "models" / "scripted", tokenizer, TEMPLATE)
    write_model(
        folder,
        **drawn_ids(tokenizer),
        context=200_000,
        prefill_per_step=200_000,
        script=ids(answer),
        replies=[(ids(mark), ids(reply)) for mark, reply in replies],
    )
    box.serve(folder)


def ask(codex: Path, box: Box, work: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    home = box.folder / "codex"
    home.mkdir()
    environ = {"CODEX_HOME": str(home), "HOME": str(box.folder)}
    written = box.run("connect", "codex", "--write", **environ)
    assert written.code == 0, written.err
    command = [str(codex), "exec", "--skip-git-repo-check", "--json", *options, "Do the task QZ0"]
    return subprocess.run(
        command,
        cwd=work,
        env={**{n: v for n, v in os.environ.items() if not n.startswith("OPENAI_")}, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def events(done: "subprocess.CompletedProcess[str]") -> list[dict]:
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_turn_with_a_command_and_a_final_answer(codex: Path, box: Box, work: Path) -> None:
    echo = call("exec_command", {"cmd": "echo ZQ$((3 * 7))"})
    serve(box, [("ZQ21", "All done, ZQ9.")], f"<think>\nZQ3\n</think>\n\nI will look.\n{echo}")
    said = events(ask(codex, box, work))
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


def test_custom_tools_and_tools_in_namespaces(codex: Path, box: Box, work: Path) -> None:
    """`apply_patch` takes a text that follows its grammar; models of a catalog of one's own are shown it."""
    close = call("multi_agent_v1__close_agent", {"target": "ZQ5"})
    patch = call("apply_patch", {"input": PATCH})
    replies = [("made.txt\n", "The file is there, ZQ9."), ("invalid agent id", patch)]
    serve(box, replies, close)
    catalog = box.folder / "catalog.json"
    catalog.write_text(json.dumps({"models": [CATALOG]}))
    options = ["-c", f'model_catalog_json="{catalog}"', "--sandbox", "danger-full-access"]
    done = ask(codex, box, work, *options)
    said = events(done)
    items = [each["item"] for each in said if each["type"] == "item.completed"]
    assert items[-1].get("text") == "The file is there, ZQ9.", (items, done.stderr[-2000:])
    assert "invalid agent id ZQ5" in done.stderr  # so it ran the tool of that namespace
    assert (work / "made.txt").read_text() == "ZQ2\n"
    assert any(each["type"] == "file_change" for each in items)
