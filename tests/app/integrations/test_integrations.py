"""Settings for other programs: what is printed, and files of theirs that are merged and kept."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from llmbox.app.errors import CliError, Exit
from llmbox.app.integrations.guides import (
    GUIDES,
    MCP_PROGRAMS,
    Endpoint,
    mcp_command,
)
from llmbox.app.integrations.settings_file import as_text, merge_settings
from support.cli_call import Call, FakeClient, call, home

__all__ = ["call", "home"]


def daemon(*, host: str = "127.0.0.1", key: bool = False) -> FakeClient:
    return FakeClient(
        {
            "/admin/api/status": {"url": "http://127.0.0.1:7411", "host": host},
            "/v1/models": {"data": [{"id": "qwen", "context_window": 32768}, {"id": "org/other"}]},
            "/admin/api/config": {"settings": {"server.require_key": {"value": key}}},
        }  # no others: /openapi.json, for one, takes a second when it is first asked for
    )


def at(*, needs_key: bool = False) -> Endpoint:
    return Endpoint(
        root="http://h:1", model="m", models=("m", "n/o"), needs_key=needs_key, contexts={"m": 4096}
    )


def test_what_a_client_needs_is_printed_on_stdout_alone(call: Call):
    done = call("connect", "openwebui", client=daemon())
    assert done.code == 0
    assert done.out == (
        'export OPENAI_API_BASE_URL="http://127.0.0.1:7411/v1"\nexport OPENAI_API_KEY="none-needed"\n'
    )
    assert "start open-webui" in done.err


def test_aider_is_told_windows_and_costs_beside_what_its_file_has(call: Call, home: Path):
    file = home / ".aider.model.metadata.json"
    others = {"openai/qwen": {"max_input_tokens": 1, "supports_vision": True}, "x/y": {"mode": "chat"}}
    file.write_text(json.dumps(others))
    done = call("connect", "aider", "--write", client=daemon())
    assert done.code == 0, done.err
    assert "aider --model openai/qwen" in done.err
    assert 'OPENAI_API_BASE="http://127.0.0.1:7411/v1"' in done.err, "the file names no address"
    free = {"input_cost_per_token": 0, "output_cost_per_token": 0}
    kind = {"litellm_provider": "openai", "mode": "chat"}
    window = {"max_input_tokens": 32768, "max_output_tokens": 8192, "supports_vision": True}
    assert json.loads(file.read_text()) == {
        "openai/qwen": free | kind | window,
        "openai/org/other": free | kind,
        "x/y": {"mode": "chat"},
    }
    (backup,) = home.glob(".aider*before-llmbox*")
    assert json.loads(backup.read_text()) == others


def test_coding_agents_are_told_what_model_they_need(call: Call):
    assert "calls tools" in call("connect", "opencode", client=daemon()).err
    assert "calls tools" not in call("connect", "aider", client=daemon()).err


def test_json_names_file_settings_and_model(call: Call, home: Path):
    done = call("connect", "opencode", "--model", "org/other", "--json", client=daemon())
    told = json.loads(done.out)
    assert told["schema"] == "llmbox.connect/1"
    assert told["file"] == str(home / ".config" / "opencode" / "opencode.json")
    assert list(told["settings"]["provider"]["llmbox"]["models"]) == ["org/other"]


def test_codex_is_told_the_window_of_its_model(call: Call):
    assert "model_context_window = 32768" in call("connect", "codex", client=daemon()).out
    other = call("connect", "codex", "--model", "org/other", client=daemon())
    assert (other.code, "model_context_window" in other.out) == (0, False)


@pytest.mark.parametrize(("context", "longest"), [(4096, 1024), (65536, 8192), (None, 8192)])
def test_answers_of_claude_code_fit_the_context(context: int | None, longest: int):
    settings = GUIDES["claude"].settings
    assert settings is not None
    told = settings(replace(at(), contexts={} if context is None else {"m": context}))
    assert told["env"]["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(longest)


def test_an_assistant_that_is_no_client_is_shown_its_command(call: Call):
    done = call("connect", "cursor")
    assert (done.code, "llmbox connect mcp cursor" in done.err) == (Exit.USAGE, True)


def test_unknown_clients_models_and_writes_without_a_file(call: Call):
    assert call("connect", "emacs", client=daemon()).code == Exit.USAGE
    assert call("connect", "aider", "--model", "x", client=daemon()).code == Exit.NOT_FOUND
    assert call("connect", "openwebui", "--write", client=daemon()).code == Exit.USAGE
    assert call("connect", "--write").code == Exit.USAGE
    assert call("connect", "aider").code == Exit.UNREACHABLE


def test_the_list_needs_no_daemon(call: Call):
    assert call("connect", "-q").out.split() == list(GUIDES)
    assert json.loads(call("connect", "--json").out)["schema"] == "llmbox.clients/1"


@pytest.mark.parametrize("where", [{"host": "0.0.0.0"}, {"key": True}])
def test_where_a_key_is_needed_it_is_read_from_a_variable(call: Call, where: dict[str, object]):
    done = call("connect", "opencode", client=daemon(**where))
    assert "{env:LLMBOX_API_KEY}" in done.out
    assert "llmbox key add" in done.err


def test_write_merges_shows_the_difference_and_keeps_a_copy(call: Call, home: Path):
    file = home / ".config" / "opencode" / "opencode.json"
    file.parent.mkdir(parents=True)
    old = json.dumps({"theme": "dark", "provider": {"other": {"npm": "x"}, "llmbox": {"name": "old"}}})
    file.write_text(old)
    done = call("connect", "opencode", "--write", client=daemon())
    written = json.loads(file.read_text())
    assert done.code == 0
    assert written["theme"] == "dark"
    assert written["provider"]["other"] == {"npm": "x"}
    assert written["provider"]["llmbox"]["options"]["baseURL"] == "http://127.0.0.1:7411/v1"
    assert '+      "name": "llmbox"' in done.out
    (backup,) = file.parent.glob("*before-llmbox*")
    assert backup.read_text() == old
    again = call("connect", "opencode", "--write", "--json", client=daemon())
    assert json.loads(again.out)["changed"] is False
    assert len(list(file.parent.iterdir())) == 2


def test_toml_keeps_comments_and_tables_of_others(tmp_path: Path):
    file = tmp_path / "config.toml"
    file.write_text('# mine\napproval_policy = "never"  # why\n\n[mcp_servers.docs]\ncommand = "docs"\n')
    guide = GUIDES["codex"]
    assert guide.settings is not None
    _, new = merge_settings(guide, file, guide.settings(at(needs_key=True)))
    read = tomllib.loads(new)
    assert "# mine" in new
    assert "# why" in new
    assert (read["model"], read["model_provider"]) == ("m", "llmbox")
    assert read["mcp_servers"] == {"docs": {"command": "docs"}}
    assert (read["web_search"], read["model_context_window"]) == ("disabled", 4096)
    assert read["model_providers"]["llmbox"]["wire_api"] == "responses"
    assert read["model_providers"]["llmbox"]["env_key"] == "LLMBOX_API_KEY"


@pytest.mark.parametrize("name", ["opencode", "pi", "qwen", "continue", "aider"])
def test_an_agent_is_told_of_windows_and_of_answers_that_fit_them(name: str):
    """An agent that does not know them requests 32,000 tokens of output of a window of 4,096."""
    settings = GUIDES[name].settings
    assert settings is not None
    told = json.dumps(settings(at()))
    assert told.count("4096") == 1
    assert told.count("1024") == 1


def test_entries_of_others_in_a_list_stay(tmp_path: Path):
    file = tmp_path / "settings.json"
    others = [{"id": "theirs", "baseUrl": "http://x"}, {"id": "m", "baseUrl": "http://old"}]
    file.write_text(json.dumps({"modelProviders": {"openai": others}, "security": {"a": 1}}))
    guide = GUIDES["qwen"]
    assert guide.settings is not None
    _, new = merge_settings(guide, file, guide.settings(at()))
    read = json.loads(new)
    urls = {each["id"]: each["baseUrl"] for each in read["modelProviders"]["openai"]}
    assert urls == {"theirs": "http://x", "m": "http://h:1/v1", "n/o": "http://h:1/v1"}
    assert read["security"] == {"a": 1, "auth": {"selectedType": "openai"}}
    file.write_text(new)
    assert merge_settings(guide, file, guide.settings(at())) == (new, new)


@pytest.mark.parametrize(
    ("name", "text"),
    [("opencode", '{"a": 1, // a comment\n}'), ("opencode", "[1]"), ("codex", "a = ["), ("continue", "x: 1")],
)
def test_what_cannot_be_merged_safely_is_left_alone(tmp_path: Path, name: str, text: str):
    file = tmp_path / "settings"
    file.write_text(text)
    guide = GUIDES[name]
    assert guide.settings is not None
    with pytest.raises(CliError) as caught:
        merge_settings(guide, file, guide.settings(at()))
    assert caught.value.exit == Exit.CONFLICT
    assert file.read_text() == text


@pytest.mark.parametrize("name", ["opencode", "codex", "continue"])
def test_a_file_without_text_is_written(tmp_path: Path, name: str):
    file = tmp_path / "settings"
    file.write_text("\n")
    guide = GUIDES[name]
    assert guide.settings is not None
    settings = guide.settings(at())
    assert merge_settings(guide, file, settings) == ("\n", as_text(guide, settings))


def test_yaml_is_what_a_yaml_reader_reads():
    yaml = pytest.importorskip("yaml")
    guide = GUIDES["continue"]
    assert guide.settings is not None
    settings = guide.settings(at(needs_key=True))
    assert yaml.safe_load(as_text(guide, settings)) == settings


def test_no_settings_hold_a_key():
    for guide in GUIDES.values():
        told = str(guide.environment(at(needs_key=True)))
        told += str(guide.settings(at(needs_key=True)) if guide.settings else "")
        assert "sk-" not in told
        assert "none-needed" not in told


@pytest.mark.parametrize(("context", "window"), [(None, None), (32_768, None), (131_072, "131072")])
def test_claude_code_is_told_of_a_context_that_it_can_be_told_of(context: int | None, window: str | None):
    at = Endpoint(
        root="http://h", model="m", models=("m",), needs_key=False, contexts={"m": context} if context else {}
    )
    settings = GUIDES["claude"].settings
    assert settings is not None
    told = settings(at)["env"]
    assert told.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW") == window
    assert told["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert told["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0", "else each prompt begins with another text"


@pytest.mark.parametrize("name", MCP_PROGRAMS)
def test_an_assistant_is_set_up_beside_what_it_has_and_twice_changes_nothing(
    call: Call, home: Path, name: str
):
    guide = MCP_PROGRAMS[name]
    file = guide.file({"HOME": str(home)})
    assert file.is_relative_to(home)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('theme = "dark"\n' if guide.kind == "toml" else '{"theme": "dark"}')
    done = call("connect", "mcp", name, "--write", client=daemon())
    assert done.code == 0, done.err
    read = tomllib.loads if guide.kind == "toml" else json.loads
    merged = read(file.read_text())
    assert merged.pop("theme") == "dark"
    (servers,) = merged.values()
    assert list(servers) == ["llmbox"]
    entry = servers["llmbox"]
    command = entry["command"] if isinstance(entry["command"], list) else [entry["command"], *entry["args"]]
    assert "mcp" in command
    assert "backup" in done.err
    assert guide.run in done.err
    again = json.loads(call("connect", "mcp", name, "--write", "--json", client=daemon()).out)
    assert (again["changed"], again["file"], again["assistant"]) == (False, str(file), name)


def test_an_assistant_needs_no_daemon_and_the_list_names_its_file(call: Call, home: Path):
    listed = call("connect", "mcp")
    assert listed.code == 0
    assert str(home / ".cursor" / "mcp.json") in listed.out
    assert call("connect", "mcp", "--quiet").out.split() == list(MCP_PROGRAMS)
    rows = json.loads(call("connect", "mcp", "--json").out)["assistants"]
    assert [row["name"] for row in rows] == list(MCP_PROGRAMS)
    printed = call("connect", "mcp", "cursor", "--quiet")
    assert list(json.loads(printed.out)["mcpServers"]) == ["llmbox"]
    assert printed.err == ""


@pytest.mark.parametrize(
    "words", [["mcp", "--write"], ["mcp", "cursor", "--model", "qwen"], ["aider", "cursor"], ["mcp", "emacs"]]
)
def test_words_that_do_not_go_together_are_refused(call: Call, words: list[str]):
    assert call("connect", *words, client=daemon()).code == Exit.USAGE


def test_a_settings_file_with_comments_is_left_alone(call: Call, home: Path):
    file = MCP_PROGRAMS["vscode"].file({"HOME": str(home)})
    file.parent.mkdir(parents=True)
    file.write_text('{"servers": {} // mine\n}')
    done = call("connect", "mcp", "vscode", "--write")
    assert (done.code, "is not touched" in done.err) == (Exit.CONFLICT, True)
    assert "// mine" in file.read_text()


def test_the_command_is_a_whole_path(tmp_path: Path):
    place = ["--data-dir", "/my box"]
    python = ["/usr/bin/python3", "-P", "-m", "llmbox"]
    assert mcp_command(python, {"PATH": str(tmp_path)}, place) == [*python, "mcp", *place]
    program = tmp_path / "llmbox"
    program.touch(mode=0o755)
    assert mcp_command(python, {"PATH": str(tmp_path)}, place) == [str(program), "mcp", *place]
