"""Edits of other programs' settings files: JSON, TOML or YAML merged with what a guide says."""

import difflib
import json
import shutil
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from ..errors import CliError, Exit
from ..util.atomic_file import write_whole
from .guides import Guide, McpProgram


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
    if not old.strip():  # as some programs leave it before they have settings
        return old, as_text(guide, settings)
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
        elif isinstance(value, list) and isinstance(present, list) and _have_ids(value):
            ids = {each["id"] for each in value}
            kept = [each for each in present if not isinstance(each, Mapping) or each.get("id") not in ids]
            into[name] = [*kept, *value]
        elif present != value:
            into[name] = value


def _have_ids(entries: Sequence[Any]) -> bool:
    """Check whether a list holds tables that `id` tells apart: those of others then stay."""
    return all(isinstance(each, Mapping) and "id" in each for each in entries)


def _by_hand(file: Path, why: str) -> CliError:
    return CliError(
        f"{file} is not touched",
        why,
        "run the same command without --write, and add the lines by hand",
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
