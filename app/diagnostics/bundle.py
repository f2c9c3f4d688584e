"""`llmbox doctor --bundle FILE`: diagnostics for a bug report.

The bundle has no secrets, prompts or answers in it.
"""

import json
import os
import platform
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmbox import __version__
from llmbox.engine.hardware.machine import read_machine

from ..errors import CliError, Exit
from ..lifecycle.program import Program, package_versions
from ..util.formatting import format_setting
from .checks import Finding

GONE = "[removed]"

_SECRET_NAME = re.compile(
    r"(?i)(^|[_.-])(api[_-]?key|secrets?|passw(or)?d|tokens?|authorization|cookie|credentials?|digest)($|[_.-])"
)
_TEXT_NAME = re.compile(r"(?i)^(prompt|messages?_text|content|output|answer|rendered|system|body)$")
"""Fields that hold prompts or answers."""
_COUNT = (int, float, bool)
"""`prompt_tokens: 12` and `system: 3` are numbers about texts, not texts."""

_PATTERNS = (
    re.compile(r"sk-[A-Za-z0-9_-]{8,}"),
    re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(?i)([?&](?:token|key|signature|x-amz-[a-z-]+)=)[^&\s\"']+"),
    re.compile(r"://[^/\s:@]+:[^/\s@]+@"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"),
    re.compile(r"(?i)\b(HF_TOKEN|[A-Z0-9_]*(?:API_KEY|SECRET|PASSWORD))=\S+"),
)


def redact_text(text: str) -> str:
    for pattern in _PATTERNS:
        text = pattern.sub(GONE, text)
    return text


def redact(value: Any, name: str = "") -> Any:
    """Return a copy of plain data without secrets and without the texts of requests."""
    if isinstance(value, Mapping):
        return {redact_text(str(key)): redact(each, str(key)) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        hidden = bool(value) and _hides(name) and not all(isinstance(each, _COUNT) for each in value)
        return GONE if hidden else [redact(each) for each in value]
    if value is None or isinstance(value, _COUNT):
        return value
    return GONE if _hides(name) and value else redact_text(str(value))


def _hides(name: str) -> bool:
    return bool(_SECRET_NAME.search(name) or _TEXT_NAME.match(name))


LOG_BYTES = 1_000_000
"""Bytes taken from the end of the daemon's log."""
NOTE = (
    "Made by llmbox doctor --bundle. It holds versions, settings, findings, the machine, models in memory\n"
    "and the end of the daemon's log. Keys, tokens, prompts and answers are taken out, the request log is\n"
    "not in it. Names of models and keys and paths of files are: look through it before you give it away.\n"
)


def write_bundle(program: Program, findings: Sequence[Finding], file: Path) -> list[str]:
    """Write the bundle and return the names of its parts. Raises CliError; an existing file stays."""
    parts: dict[str, Callable[[], str]] = {
        "README.txt": lambda: NOTE,
        "findings.json": lambda: _json([asdict(each) for each in findings]),
        "versions.json": lambda: _json(_versions()),
        "machine.json": lambda: _json(asdict(read_machine())),
        "settings.json": lambda: _json(_settings(program)),
        "environment.json": lambda: _json(_environment(program)),
        "status.json": lambda: _json(program.client.get("/admin/api/status")),
        "stats.json": lambda: _json(program.client.get("/admin/api/stats")),
        "downloads.json": lambda: _json(program.client.get("/admin/api/downloads")),
        "loads.json": lambda: _json(json.loads(program.paths.loads_file.read_bytes())),
        "daemon.log": lambda: _log(program.paths.log_file),
    }
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        code = Exit.CONFLICT if isinstance(error, FileExistsError) else Exit.FAILED
        raise CliError(
            f"cannot write {file}", error.strerror or str(error), "name another FILE", code
        ) from error
    try:
        with open(handle, "wb") as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as bundle:  # noqa: PTH123
            for name, make in parts.items():
                bundle.writestr(name, _build_part(make))
    except OSError as error:
        file.unlink(missing_ok=True)
        raise CliError(f"cannot write {file}", error.strerror or str(error), "free some space") from error
    return list(parts)


def _build_part(make: Callable[[], str]) -> str:
    """Build one part. A part that is not available says why: the rest is all the more useful."""
    try:
        return make()
    except CliError as error:
        return redact_text(f"not available: {error.what}: {error.why}\n")
    except (OSError, ValueError) as error:
        return redact_text(f"not available: {error}\n")


def _json(value: Any) -> str:
    return json.dumps(redact(value), indent=1, ensure_ascii=False, default=str) + "\n"


def _versions() -> dict[str, Any]:
    return {
        "llmbox": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": package_versions(),
    }


def _settings(program: Program) -> dict[str, Any]:
    return {
        row.name: {"value": format_setting(value), "origin": str(origin)}
        for row, value, origin in program.settings().table()
    }


def _environment(program: Program) -> dict[str, str]:
    """Return the variables that llmbox reads. Tokens and keys are redacted."""
    heeded = ("LLMBOX_", "HF_", "CUDA_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "OMP_")
    data = {name: value for name, value in sorted(program.environ.items()) if name.upper().startswith(heeded)}
    return {name: GONE if "TOKEN" in name or "KEY" in name else value for name, value in data.items()}


def _log(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        text = file.read().decode("utf-8", "replace")
    return redact_text(text)
