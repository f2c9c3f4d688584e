"""Claude Code, Anthropic's coding agent: its own program against a daemon whose model's answers are known."""

import json
import os
from typing import Any

import pytest

from support.cli_box import Box, box
from support.npm_package import npm_program
from support.scripted_model import TEMPLATE, call, run, serve

__all__ = ["box"]

VERSION = "2.1.332"
STRICT = (
    "{%- if messages[1:] | selectattr('role', 'eq', 'system') | list %}"
    "{{ raise_exception('late') }}{% endif %}"
)
"""Before a template: it takes a system message only where it is the first."""
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def claude() -> list[str]:
    """The wrapper beside the program starts it also where npm has not run the package's install script."""
    program = npm_program("@anthropic-ai/claude-code", VERSION, "claude").resolve()
    return ["node", str(program.parents[1] / "cli-wrapper.cjs")]


def ask(claude: list[str], box: Box, *options: str, code: int = 0) -> dict[str, Any]:
    home, work = box.folder / "claude", box.folder / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text("ZQ4711\n")
    environ = {"CLAUDE_CONFIG_DIR": str(home), "HOME": str(box.folder)}
    written = box.run("connect", "claude", "--write", **environ)
    assert written.code == 0, written.err
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("ANTHROPIC_", "CLAUDE"))}
    command = [*claude, "-p", "Do the task QZ0", "--output-format", "json", *options]
    done = run(command, work, {**inherited, **environ, **QUIET}, code)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("template", [TEMPLATE, STRICT + TEMPLATE], ids=["late system", "system first"])
def test_a_turn_with_a_command_and_a_final_answer(claude: list[str], box: Box, template: str) -> None:
    echo = call("Bash", {"command": "echo ZQ$((3 * 7))", "description": "Count"})
    serve(box, [("ZQ21", "All done, ZQ9.")], f"I will look.\n{echo}", template)
    told = ask(claude, box, "--allowedTools", "Bash(echo:*)")
    assert (told["is_error"], told["result"], told["num_turns"]) == (False, "All done, ZQ9.", 2)
    assert told["permission_denials"] == []
    usage = told["modelUsage"]["scripted"]
    assert usage["outputTokens"] > 10
    assert usage["inputTokens"] + usage["cacheReadInputTokens"] > 1000


def test_a_file_is_read(claude: list[str], box: Box) -> None:
    read = call("Read", {"file_path": str(box.folder / "work" / "note.txt")})
    serve(box, [("ZQ4711", "It says ZQ8.")], read)
    assert ask(claude, box)["result"] == "It says ZQ8."


def test_an_answer_of_a_schema(claude: list[str], box: Box) -> None:
    """Its `--json-schema` offers a tool whose arguments are the answer."""
    answer = call("StructuredOutput", {"ok": True})
    serve(box, [("Structured output provided", "Done.")], answer)
    told = ask(claude, box, "--json-schema", json.dumps(SCHEMA))
    assert told["structured_output"] == {"ok": True}


def test_a_conversation_over_the_context_is_told_in_words_that_it_knows(claude: list[str], box: Box) -> None:
    serve(box, [], "Hello.", context=2048)
    told = ask(claude, box, code=1)
    assert told["is_error"] is True
    assert "too long" in told["result"].lower()
