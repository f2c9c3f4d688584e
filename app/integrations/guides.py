"""Settings that well-known clients need to use this daemon, after each one's public documentation."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config.paths import expand_home

KEY_VARIABLE = "LLMBOX_API_KEY"
"""Environment variable of the key, for clients that can read one: their files then hold no secret."""
NO_KEY = "none-needed"
"""Placeholder key: most clients refuse an empty one, and the daemon ignores keys that are not its own where
none is needed.
"""
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address and models of this daemon. `root` is its URL without a path."""

    root: str
    model: str
    models: tuple[str, ...]
    """All that may be asked for; `model` among them."""
    needs_key: bool
    contexts: Mapping[str, int] = field(default_factory=dict)
    """Tokens that a model's window takes, for each of `models` of which it is known."""
    certificate: str = ""
    """Path of a certificate that this machine may not trust yet; empty: plain HTTP."""

    @property
    def context(self) -> int | None:
        """Window of `model` in tokens, where it is known."""
        return self.contexts.get(self.model)

    @property
    def trust(self) -> dict[str, str]:
        """Environment in which OpenSSL's and Node's programs trust the certificate."""
        names = ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS") if self.certificate else ()
        return dict.fromkeys(names, self.certificate)

    @property
    def url(self) -> str:
        return f"{self.root}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    title: str
    needs: str = CHAT
    """Route that this client calls."""
    file: Callable[[Mapping[str, str]], Path] | None = None
    """Path of its settings, for an environment; None where there is no file that could be written."""
    kind: Literal["json", "toml", "yaml"] = "json"
    settings: Callable[[Endpoint], dict[str, Any]] | None = None
    """Content of the file."""
    environment: Callable[[Endpoint], dict[str, str]] = field(default=lambda _: {})
    run: Callable[[Endpoint], str]
    """Text of the next step."""
    agent: bool = False
    """True for a program that works by calling tools, and fills a long context."""


def key_or_none(at: Endpoint) -> str:
    return f"${KEY_VARIABLE}" if at.needs_key else NO_KEY


def _home(environ: Mapping[str, str]) -> Path:
    return expand_home(Path(environ.get("HOME") or "~"))


_LONGEST_ANSWER = 8192
"""Tokens of an answer that agents request at most: their own defaults, 32,000 and more, leave no room for a
prompt in a window of that size.
"""


_PATIENCE_MS = 3_600_000
"""Time until an agent gives up: a long prompt takes minutes on a CPU, and the defaults are five to ten."""


def _longest_answer(context: int | None) -> int:
    """Return the tokens of an answer that leave room for a prompt in a window of `context` tokens."""
    return _LONGEST_ANSWER if context is None else min(_LONGEST_ANSWER, context // 4)


def _opencode(at: Endpoint) -> dict[str, Any]:
    options = {"baseURL": at.url}
    if at.needs_key:
        options["apiKey"] = f"{{env:{KEY_VARIABLE}}}"
    models: dict[str, dict[str, Any]] = {name: {"name": name} for name in at.models}
    # Without a limit it never summarizes a conversation in time, and one over the window has no end.
    for name, context in at.contexts.items():
        models[name]["limit"] = {"context": context, "output": _longest_answer(context)}
    return {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "llmbox": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "llmbox",
                "options": options,
                "models": models,
            }
        },
    }


def _pi(at: Endpoint) -> dict[str, Any]:
    models: list[dict[str, Any]] = [{"id": name} for name in at.models]
    # Without these it takes a window of 128,000 tokens, and summarizes a conversation too late.
    for entry in models:
        if context := at.contexts.get(entry["id"]):
            entry |= {"contextWindow": context, "maxTokens": _longest_answer(context)}
    key = KEY_VARIABLE if at.needs_key else NO_KEY  # it takes a variable's name for the variable
    entry = {"baseUrl": at.url, "api": "openai-completions", "apiKey": key, "models": models}
    return {"providers": {"llmbox": entry}}


def _qwen(at: Endpoint) -> dict[str, Any]:
    entries = []
    for name in at.models:
        generation: dict[str, Any] = {"timeout": _PATIENCE_MS}
        if context := at.contexts.get(name):
            generation |= {
                "contextWindowSize": context,
                "samplingParams": {"max_tokens": _longest_answer(context)},
            }
        entry = {"id": name, "name": f"{name} (llmbox)", "baseUrl": at.url, "envKey": KEY_VARIABLE}
        entries.append({**entry, "generationConfig": generation})
    settings = {
        "modelProviders": {"openai": entries},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": at.model},
    }
    return settings if at.needs_key else {**settings, "env": {KEY_VARIABLE: NO_KEY}}


def _codex(at: Endpoint) -> dict[str, Any]:
    provider: dict[str, Any] = {"name": "llmbox", "base_url": at.url, "wire_api": "responses"}
    provider["stream_idle_timeout_ms"] = _PATIENCE_MS
    if at.needs_key:
        provider["env_key"] = KEY_VARIABLE
    data: dict[str, Any] = {"model": at.model, "model_provider": "llmbox"}
    if at.context is not None:
        # It knows the windows of OpenAI's models only, and summarizes before they are full.
        data["model_context_window"] = at.context
    # OpenAI's servers search the web; this one does not.
    return {**data, "web_search": "disabled", "model_providers": {"llmbox": provider}}


_LEAST_COMPACT_WINDOW = 100_000
"""Smallest window that Claude Code accepts. With less it shortens a conversation when a request is
refused.
"""


def _claude(at: Endpoint) -> dict[str, Any]:
    data = {"ANTHROPIC_BASE_URL": at.root, "ANTHROPIC_MODEL": at.model}
    # It runs small tasks under names of Anthropic's models, and requests 32,000 tokens by default.
    data |= {f"ANTHROPIC_DEFAULT_{size}_MODEL": at.model for size in ("OPUS", "SONNET", "HAIKU")}
    data["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(_longest_answer(at.context))
    data["API_TIMEOUT_MS"] = str(_PATIENCE_MS)
    # Versions before 2.1.181 begin the system prompt with a token of the request: no prefix would be found.
    data["CLAUDE_CODE_ATTRIBUTION_HEADER"] = "0"
    data["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"  # reports and updates that would leave the box
    if at.context is not None and at.context >= _LEAST_COMPACT_WINDOW:
        data["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(at.context)
    return {"env": data if at.needs_key else {**data, "ANTHROPIC_AUTH_TOKEN": NO_KEY}}


def _continue(at: Endpoint) -> dict[str, Any]:
    entry = {"provider": "openai", "apiBase": at.url}
    entry["apiKey"] = f"${{{{ secrets.{KEY_VARIABLE} }}}}" if at.needs_key else NO_KEY
    models: list[dict[str, Any]] = [{"name": f"llmbox {name}", "model": name, **entry} for name in at.models]
    for each in models:
        if context := at.contexts.get(each["model"]):
            limits = {"contextLength": context, "maxTokens": _longest_answer(context)}
            each["defaultCompletionOptions"] = limits
    return {"name": "llmbox", "version": "0.0.1", "schema": "v1", "models": models}


def _aider(at: Endpoint) -> dict[str, Any]:
    # Of a model that its own table lacks it knows neither window nor costs, and warns at each start.
    entries: dict[str, Any] = {}
    for name in at.models:
        entry: dict[str, Any] = {"input_cost_per_token": 0, "output_cost_per_token": 0}
        if context := at.contexts.get(name):
            entry |= {"max_input_tokens": context, "max_output_tokens": _longest_answer(context)}
        entries[f"openai/{name}"] = {**entry, "litellm_provider": "openai", "mode": "chat"}
    return entries


GUIDES: dict[str, Guide] = {
    "openai": Guide(
        title="OpenAI's own libraries",
        environment=lambda at: {"OPENAI_BASE_URL": at.url, "OPENAI_API_KEY": key_or_none(at)},
        run=lambda at: f"client.chat.completions.create(model={at.model!r}, …)",
    ),
    "opencode": Guide(
        title="opencode",
        file=lambda environ: (
            Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config") / "opencode" / "opencode.json"
        ),
        settings=_opencode,
        run=lambda at: f"opencode --model llmbox/{at.model}",
        agent=True,
    ),
    "pi": Guide(
        title="Pi",
        file=lambda environ: (
            Path(environ.get("PI_CODING_AGENT_DIR") or _home(environ) / ".pi" / "agent") / "models.json"
        ),
        settings=_pi,
        run=lambda at: f"pi --model llmbox/{at.model}",
        agent=True,
    ),
    "qwen": Guide(
        title="Qwen Code",
        file=lambda environ: Path(environ.get("QWEN_HOME") or _home(environ) / ".qwen") / "settings.json",
        settings=_qwen,
        run=lambda _: "qwen",
        agent=True,
    ),
    "continue": Guide(
        title="Continue (VS Code, JetBrains)",
        file=lambda environ: _home(environ) / ".continue" / "config.yaml",
        kind="yaml",
        settings=_continue,
        run=lambda at: f"choose “llmbox {at.model}” in Continue's model list",
    ),
    "aider": Guide(
        title="aider",
        file=lambda environ: _home(environ) / ".aider.model.metadata.json",
        settings=_aider,
        environment=lambda at: {"OPENAI_API_BASE": at.url, "OPENAI_API_KEY": key_or_none(at)},
        run=lambda at: f"aider --model openai/{at.model}",
    ),
    "openwebui": Guide(
        title="Open WebUI",
        environment=lambda at: {"OPENAI_API_BASE_URL": at.url, "OPENAI_API_KEY": key_or_none(at)},
        run=lambda _: "start open-webui with these, or enter them under Admin Settings, Connections, OpenAI",
    ),
    "codex": Guide(
        title="Codex",
        needs=RESPONSES,
        file=lambda environ: Path(environ.get("CODEX_HOME") or _home(environ) / ".codex") / "config.toml",
        kind="toml",
        settings=_codex,
        run=lambda _: "codex",
        agent=True,
    ),
    "claude": Guide(
        title="Claude Code",
        needs=MESSAGES,
        file=lambda environ: (
            Path(environ.get("CLAUDE_CONFIG_DIR") or _home(environ) / ".claude") / "settings.json"
        ),
        settings=_claude,
        environment=lambda at: {"ANTHROPIC_AUTH_TOKEN": f"${KEY_VARIABLE}"} if at.needs_key else {},
        run=lambda _: "claude",
        agent=True,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class McpProgram:
    """Assistant that starts MCP servers by a command."""

    title: str
    file: Callable[[Mapping[str, str]], Path]
    """Path of its settings for all projects."""
    kind: Literal["json", "toml"] = "json"
    settings: Callable[[Sequence[str]], dict[str, Any]]
    """Content of the file, for the command that serves MCP."""
    run: str
    """Text of the next step."""


def _mcp_servers(command: Sequence[str]) -> dict[str, Any]:
    """Build the entry in the form that most assistants share."""
    return {"mcpServers": {"llmbox": {"command": command[0], "args": list(command[1:])}}}


def _config_folder(environ: Mapping[str, str], name: str) -> Path:
    """Return the folder of a desktop program."""
    if sys.platform == "darwin":
        return _home(environ) / "Library" / "Application Support" / name
    return Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config") / name


MCP_PROGRAMS: dict[str, McpProgram] = {
    "claude-desktop": McpProgram(
        title="Claude Desktop",
        file=lambda environ: _config_folder(environ, "Claude") / "claude_desktop_config.json",
        settings=_mcp_servers,
        run="quit Claude Desktop and start it again",
    ),
    "claude": McpProgram(
        title="Claude Code",
        file=lambda environ: Path(environ.get("CLAUDE_CONFIG_DIR") or _home(environ)) / ".claude.json",
        settings=lambda command: {
            "mcpServers": {"llmbox": {"type": "stdio", **_mcp_servers(command)["mcpServers"]["llmbox"]}}
        },
        run="claude, and /mcp lists it",
    ),
    "cursor": McpProgram(
        title="Cursor",
        file=lambda environ: _home(environ) / ".cursor" / "mcp.json",
        settings=_mcp_servers,
        run="Cursor's settings, MCP, list it",
    ),
    "vscode": McpProgram(
        title="VS Code (Copilot's agent mode)",
        file=lambda environ: _config_folder(environ, "Code") / "User" / "mcp.json",
        settings=lambda command: {
            "servers": {"llmbox": {"type": "stdio", "command": command[0], "args": list(command[1:])}}
        },
        run="“MCP: List Servers” in VS Code's command palette",
    ),
    "codex": McpProgram(
        title="Codex",
        file=lambda environ: Path(environ.get("CODEX_HOME") or _home(environ) / ".codex") / "config.toml",
        kind="toml",
        settings=lambda command: {
            "mcp_servers": {"llmbox": {"command": command[0], "args": list(command[1:])}}
        },
        run="codex, and /mcp lists it",
    ),
    "opencode": McpProgram(
        title="opencode",
        file=lambda environ: (
            Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config") / "opencode" / "opencode.json"
        ),
        settings=lambda command: {
            "mcp": {"llmbox": {"type": "local", "command": list(command), "enabled": True}}
        },
        run="opencode mcp list",
    ),
    "gemini": McpProgram(
        title="Gemini CLI",
        file=lambda environ: _home(environ) / ".gemini" / "settings.json",
        settings=_mcp_servers,
        run="gemini, and /mcp lists it",
    ),
    "windsurf": McpProgram(
        title="Windsurf",
        file=lambda environ: _home(environ) / ".codeium" / "windsurf" / "mcp_config.json",
        settings=_mcp_servers,
        run="Windsurf's settings, Cascade, MCP servers list it",
    ),
    "lmstudio": McpProgram(
        title="LM Studio",
        file=lambda environ: _home(environ) / ".lmstudio" / "mcp.json",
        settings=_mcp_servers,
        run="switch it on under Program, Integrations",
    ),
}
"""Assistants by the name that `llmbox connect mcp` takes."""


def mcp_command(program: Sequence[str], environ: Mapping[str, str], location: Sequence[str]) -> list[str]:
    """Return the command that serves MCP, by its whole path: desktop programs have another PATH.

    `program` starts llmbox where no command of that name is on the PATH.
    """
    found = shutil.which("llmbox", path=environ.get("PATH"))
    return [*([found] if found else program), "mcp", *location]
