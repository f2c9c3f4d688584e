"""Settings that well-known clients need to use this daemon, after each one's public documentation; edits of
their files.
"""

import difflib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomlkit
from tomlkit.exceptions import TOMLKitError

from .errors import CliError, Exit
from .util.atomic_file import write_whole

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
    context: int | None = None
    """Tokens that `model` takes, where that is known."""
    certificate: str = ""
    """Path of a certificate that this machine may not trust yet; empty: plain HTTP."""

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
    """The route without which this client cannot work."""
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
    return Path(environ.get("HOME") or "~").expanduser()


def _opencode(at: Endpoint) -> dict[str, Any]:
    options = {"baseURL": at.url}
    if at.needs_key:
        options["apiKey"] = f"{{env:{KEY_VARIABLE}}}"
    return {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "llmbox": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "llmbox",
                "options": options,
                "models": {name: {"name": name} for name in at.models},
            }
        },
    }


def _codex(at: Endpoint) -> dict[str, Any]:
    provider: dict[str, Any] = {"name": "llmbox", "base_url": at.url, "wire_api": "responses"}
    # A long prompt takes minutes on a CPU; Codex gives up after five without an event by default.
    provider["stream_idle_timeout_ms"] = 3_600_000
    if at.needs_key:
        provider["env_key"] = KEY_VARIABLE
    data: dict[str, Any] = {"model": at.model, "model_provider": "llmbox"}
    if (
        at.context is not None
    ):  # it knows the windows of OpenAI's models only, and summarizes before they are full
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
    data["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = "8192"
    data["API_TIMEOUT_MS"] = "3600000"  # a long prompt takes minutes on a CPU; it gives up after ten
    # Versions before 2.1.181 begin the system prompt with a token of the request: no prefix would be found.
    data["CLAUDE_CODE_ATTRIBUTION_HEADER"] = "0"
    data["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"  # reports and updates that would leave the box
    if at.context is not None and at.context >= _LEAST_COMPACT_WINDOW:
        data["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(at.context)
    return {"env": data if at.needs_key else {**data, "ANTHROPIC_AUTH_TOKEN": NO_KEY}}


def _continue(at: Endpoint) -> dict[str, Any]:
    entry = {"provider": "openai", "apiBase": at.url}
    entry["apiKey"] = f"${{{{ secrets.{KEY_VARIABLE} }}}}" if at.needs_key else NO_KEY
    models = [{"name": f"llmbox {name}", "model": name, **entry} for name in at.models]
    return {"name": "llmbox", "version": "0.0.1", "schema": "v1", "models": models}


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
    "continue": Guide(
        title="Continue (VS Code, JetBrains)",
        file=lambda environ: _home(environ) / ".continue" / "config.yaml",
        kind="yaml",
        settings=_continue,
        run=lambda at: f"choose “llmbox {at.model}” in Continue's model list",
    ),
    "aider": Guide(
        title="aider",
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


def as_text(guide: Guide | McpProgram, settings: Mapping[str, Any]) -> str:
    """Format the settings alone, as they would stand in the client's file."""
    if guide.kind == "toml":
        return tomlkit.dumps(settings)
    if guide.kind == "yaml":
        return _yaml(settings)
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def merge_settings(guide: Guide | McpProgram, file: Path, settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the file's text, and the same with `settings`. Raises CliError where that cannot be
    done safely.
    """
    try:
        old = file.read_text("utf-8")
    except FileNotFoundError:
        return "", as_text(guide, settings)
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read {file}", str(error), "merge the settings by hand") from error
    if guide.kind == "yaml":
        if as_text(guide, settings) == old:
            return old, old
        raise _by_hand(file, "it is YAML, and writing it anew would lose its comments")
    try:
        document: Any = tomlkit.parse(old) if guide.kind == "toml" else json.loads(old)
        if not isinstance(document, MutableMapping):
            raise _by_hand(file, "it holds no table of settings")
        _merge(document, settings)
    except (ValueError, TOMLKitError) as error:
        raise _by_hand(file, f"it is not plain {guide.kind.upper()}: {error}") from error
    if guide.kind == "toml":
        return old, tomlkit.dumps(document)
    return old, json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def difference(file: Path, old: str, new: str) -> str:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), str(file), f"{file} (new)"
    )
    return "".join(lines)


def replace(file: Path, new: str) -> Path | None:
    """Replace the whole file; return the copy of the old one, if there was one."""
    try:
        target = file.resolve()  # a link (dotfiles under version control) stays a link
        target.parent.mkdir(parents=True, exist_ok=True)
        backup = None
        if target.exists():
            backup = target.with_name(f"{target.name}.before-llmbox-{time.strftime('%Y%m%d-%H%M%S')}")
            shutil.copy2(target, backup)
        write_whole(target, new.encode())
    except OSError as error:
        raise CliError(
            f"cannot write {file}", error.strerror or str(error), "check the folder's owner and free space"
        ) from error
    return backup


def _merge(into: MutableMapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        present = into.get(name)
        if isinstance(value, Mapping) and isinstance(present, MutableMapping):
            _merge(present, value)
        elif present != value:
            into[name] = value


def _by_hand(file: Path, why: str) -> CliError:
    return CliError(
        f"{file} is not touched",
        why,
        "run the same without --write, and put the lines where they belong",
        Exit.CONFLICT,
    )


def _yaml(settings: Mapping[str, Any]) -> str:
    """Format YAML with scalars as JSON, which YAML accepts."""
    lines = []
    for name, value in settings.items():
        if not isinstance(value, list):
            lines.append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
            continue
        lines.append(f"{name}:")
        for entry in value:
            pairs = [f"{key}: {json.dumps(each, ensure_ascii=False)}" for key, each in entry.items()]
            lines.append("  - " + "\n    ".join(pairs))
    return "\n".join(lines) + "\n"
