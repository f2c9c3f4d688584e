"""Loader of settings: merges flags, environment and files into one `Settings`, with the origin of each value.

function         input, in order of precedence
load_settings    flags > LLMBOX_SECTION_KEY > user file > system file > built-in
check_value      one value from any source: type, choices, range

An invalid key or value is an error that names its place and the nearest valid key.
"""

import re
import tomllib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import tomlkit

from ..errors import CliError, Exit
from ..util.atomic_file import write_whole
from .entries import Scalar
from .paths import Paths, elsewhere, private_dir
from .settings import SECTIONS, Settings, SettingSpec, schema

Source = Literal["flag", "env", "user", "system", "default"]
PREFIX = "LLMBOX_"
AUTO = ("auto", "")
OVERRIDES = "model.overrides"
_OVERRIDE = re.compile(r"(?P<model>[^=\s,]{1,200}):(?P<key>[a-z_]{1,40})=(?P<value>[^,]{0,400})")


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """Origin of a value. `place` is a flag, a variable, or `file:line`."""

    source: Source
    place: str = ""

    def __str__(self) -> str:
        return f"{self.source} ({self.place})" if self.place else self.source


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with the origin of each value."""

    settings: Settings
    origins: Mapping[str, SettingOrigin]

    def table(self) -> list[tuple[SettingSpec, Scalar, SettingOrigin]]:
        return [(row, self.settings.get(name), self.origins[name]) for name, row in schema().items()]


def load_settings(paths: Paths, environ: Mapping[str, str], flags: Mapping[str, Scalar]) -> LoadedSettings:
    """Load all settings. `flags` holds only values given on the command line, by `section.key`. Raises
    CliError (exit 2).
    """
    values = {name: row.default for name, row in schema().items()}
    origins = dict.fromkeys(values, SettingOrigin("default"))
    files: tuple[tuple[Source, Path], ...] = (("system", paths.system_config), ("user", paths.config_file))
    for source, path in files:
        for name, (value, line) in read_file(path).items():
            values[name], origins[name] = (
                value,
                SettingOrigin(source, f"{path}:{line}" if line else str(path)),
            )
    for name, value in read_environment(environ).items():
        values[name], origins[name] = value, SettingOrigin("env", schema()[name].variable)
    for name, value in flags.items():
        place = "--" + name.partition(".")[2].replace("_", "-")
        values[name] = check_value(schema()[name], value, place)
        origins[name] = SettingOrigin("flag", place)
    return LoadedSettings(build(values), origins)


def build(values: Mapping[str, Scalar]) -> Settings:
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, value in values.items():
        section, _, attribute = name.partition(".")
        sections[section][attribute] = value
    return Settings(**{name: cls(**sections[name]) for name, cls in SECTIONS.items()})


def read_file(path: Path) -> dict[str, tuple[Scalar, int | None]]:
    """Read the checked values of one TOML file with their lines. An absent file is empty."""
    return parse(read_text(path), path)


def read_text(path: Path) -> str:
    """Read a settings file, with or without a byte order mark. An absent file is empty. Raises CliError."""
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        return ""
    except PermissionError as error:
        fix = f"let this user read it, or {elsewhere(path)}"
        raise CliError(f"cannot read {path}", "Permission denied", fix, Exit.DENIED) from error
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8: {error}"
        raise CliError(f"cannot read {path}", why, "save it as UTF-8, or remove it", Exit.USAGE) from error
    except OSError as error:
        why = error.strerror or str(error)
        raise CliError(f"cannot read {path}", why, "fix or remove the file", Exit.USAGE) from error


def parse(text: str, path: Path) -> dict[str, tuple[Scalar, int | None]]:
    """Parse TOML text. Returns checked values with their lines. Raises CliError (exit 2)."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # some numbers and nesting are more than tomllib can hold
        why = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise CliError(f"{path} is not valid TOML", why, "llmbox config edit", Exit.USAGE) from error
    found: dict[str, tuple[Scalar, int | None]] = {}
    for section, table in document.items():
        if section not in SECTIONS or not isinstance(table, dict):
            raise _unknown_section(
                section, path, _line_of(text, section, None), is_table=isinstance(table, dict)
            )
        for attribute, value in table.items():
            line = _line_of(text, section, attribute)
            place = f"{path}:{line}" if line else str(path)
            row = schema().get(f"{section}.{attribute}")
            if row is None:
                raise unknown_key(f"{section}.{attribute}", place)
            found[row.name] = check_value(row, value, place), line
    return found


def read_environment(environ: Mapping[str, str]) -> dict[str, Scalar]:
    """Read the LLMBOX_SECTION_KEY variables. Other LLMBOX_ names (LLMBOX_DATA_DIR) are not settings and are
    ignored.
    """
    by_variable = {row.variable: row for row in schema().values()}
    found: dict[str, Scalar] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable in by_variable:
            row = by_variable[variable]
            found[row.name] = check_value(row, text, variable, from_text=True)
        elif variable.removeprefix(PREFIX).partition("_")[0].lower() in SECTIONS:
            hint = get_close_matches(variable, by_variable, n=1)
            raise CliError(
                f"unknown setting {variable} in the environment",
                f"did you mean {hint[0]}?" if hint else "no key has this name",
                "unset it, or see all keys: llmbox config show",
                Exit.USAGE,
            )
    return found


def check_value(row: SettingSpec, value: object, place: str, *, from_text: bool = False) -> Scalar:
    """Return the value in its final type. `from_text` also parses numbers, yes/no and comma lists."""
    if row.optional and (value is None or value in AUTO):
        return None
    converted = _from_text(row, value) if from_text and isinstance(value, str) else _from_toml(row, value)
    if converted is None:
        raise _bad(row, place, f"must be {_kind_in_words(row)}, not {value!r}")
    if row.choices and converted not in row.choices:
        raise _bad(row, place, f"must be one of {', '.join(row.choices)}, not {value!r}")
    if isinstance(converted, int | float) and not isinstance(converted, bool):
        inside = (row.low is None or converted >= row.low) and (row.high is None or converted <= row.high)
        if not inside:  # NaN is outside of every range
            raise _bad(row, place, f"must be {_range_in_words(row)}, not {value}")
    if row.each is not None and isinstance(converted, str | tuple):
        is_good, words = row.each
        items = (converted,) if isinstance(converted, str) else converted
        if bad := [item for item in items if not is_good(item)]:
            raise _bad(row, place, f"holds {words}; not {bad[0]!r}")
    if row.name == OVERRIDES and isinstance(converted, tuple):
        for entry in converted:
            read_override(entry, place)
    return converted


def read_override(entry: str, place: str = "") -> tuple[str, str, Scalar]:
    """Read an entry of `model.overrides`: the model or glob, the full key, and the checked value. Raises
    CliError (exit 2).
    """
    parts = _OVERRIDE.fullmatch(entry)
    if parts is None:
        raise _bad(schema()[OVERRIDES], place, f"holds entries such as qwen*:max_running=24; not {entry!r}")
    row = schema().get(f"model.{parts['key']}")
    if row is None or row.name == OVERRIDES:
        raise unknown_key(f"model.{parts['key']}", place)
    return parts["model"], row.name, check_value(row, parts["value"], place, from_text=True)


def find_overrides(entries: Sequence[str], model: str) -> dict[str, Scalar]:
    """Return what `model.overrides` sets for a model, by full key."""
    found: dict[str, Scalar] = {}
    for name, key, value in map(read_override, entries):
        if key not in found and fnmatchcase(model, name):
            found[key] = value
    return found


def _from_toml(row: SettingSpec, value: object) -> Scalar:
    if row.kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if row.kind is tuple and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if type(value) is row.kind and isinstance(value, bool | int | str):
        return value
    return None


def _from_text(row: SettingSpec, text: str) -> Scalar:
    if row.kind is str:
        return text
    if row.kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if row.kind is bool:
        return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False}.get(
            text.lower(), False if text.lower() in {"no", "off"} else None
        )
    try:
        return int(text) if row.kind is int else float(text)
    except ValueError:
        return None


def _kind_in_words(row: SettingSpec) -> str:
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        tuple: "a list of text",
    }
    return words[row.kind] + (" or auto" if row.optional else "")


def _range_in_words(row: SettingSpec) -> str:
    low, high = (None if each is None else _number(each) for each in (row.low, row.high))
    if low is None or high is None:
        return f"at most {high}" if low is None else f"at least {low}"
    return f"between {low} and {high}"


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 1e6 else str(int(value))


def _bad(row: SettingSpec, place: str, why: str) -> CliError:
    return CliError(
        f"bad value for {row.name}" + (f" ({place})" if place != row.name else ""),
        f"{row.name} {why}",
        f"llmbox config show {row.section}",
        Exit.USAGE,
    )


def unknown_key(name: str, place: str = "") -> CliError:
    """Error (exit 2) of an unknown key, with the nearest valid one."""
    if name not in SECTIONS and "." not in name and (section := get_close_matches(name, SECTIONS, n=1)):
        return CliError(
            f"unknown section {name}" + (f" ({place})" if place else ""),
            f"did you mean {section[0]}?",
            "see all keys: llmbox config show",
            Exit.USAGE,
        )
    hint = get_close_matches(name, schema(), n=1) or [
        full for full in schema() if full.partition(".")[2] == name.rpartition(".")[2]
    ]
    return CliError(
        f"unknown key {name}" + (f" ({place})" if place else ""),
        f"did you mean {hint[0]}?" if hint else "no key has a name like it",
        "see all keys: llmbox config show",
        Exit.USAGE,
    )


def _unknown_section(section: str, path: Path, line: int | None, *, is_table: bool) -> CliError:
    place = f"{path}:{line}" if line else str(path)
    if not is_table:
        return unknown_key(section, place)
    hint = get_close_matches(section, SECTIONS, n=1)
    return CliError(
        f"unknown section [{section}] ({place})",
        f"did you mean [{hint[0]}]?" if hint else f"sections are {', '.join(SECTIONS)}",
        "see all keys: llmbox config show",
        Exit.USAGE,
    )


def _line_of(text: str, section: str, attribute: str | None) -> int | None:
    """Line of `[section]` or of a key in it. None for spellings of TOML that are not recognized here."""
    current = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if line.startswith("["):
            current = line.strip("[]# ").replace('"', "").replace(" ", "")
            if attribute is None and current == section:
                return number
            continue
        name = line.partition("=")[0].strip().replace('"', "").replace("'", "")
        full = f"{current}.{name}" if current else name
        if attribute is None and full == section:
            return number
        if attribute is not None and full == f"{section}.{attribute}":
            return number
    return None


TEMPLATE_HEAD = """\
# Settings of llmbox. A line that begins with # shows a default; remove the # to change it.
# Precedence: flag, LLMBOX_SECTION_KEY, this file, /etc/llmbox/config.toml, built-in.
"""


def set_value(path: Path, row: SettingSpec, value: Scalar) -> None:
    """Write one checked value. Raises CliError if the file was invalid before."""
    text = read_text(path)
    parse(text, path)
    document = tomlkit.parse(text)
    section, _, attribute = row.name.partition(".")
    if section not in document:
        document.add(section, tomlkit.table())
    table = document[section]
    assert isinstance(table, MutableMapping)  # a table or an inline one: `parse` let nothing else pass
    table[attribute] = "auto" if value is None else list(value) if isinstance(value, tuple) else value
    text = tomlkit.dumps(document)
    parse(text, path)
    write_atomic(path, text)


def remove_value(path: Path, row: SettingSpec) -> None:
    """Remove a key from the file, so that its default holds again; an absent key is not an error."""
    if row.name not in read_file(path):
        return
    document = tomlkit.parse(read_text(path))
    section, _, attribute = row.name.partition(".")
    table = document[section]
    assert isinstance(table, MutableMapping)  # `read_file` let nothing else pass
    del table[attribute]
    write_atomic(path, tomlkit.dumps(document))


def write_atomic(path: Path, text: str) -> None:
    """Write the file atomically: it has the old content or the new, never half of it."""
    if not path.parent.is_dir():
        private_dir(path.parent)
    target = path.resolve()  # a link (dotfiles under version control) stays a link
    try:
        write_whole(target, text.encode())
    except OSError as error:
        raise CliError(
            f"cannot write {path}",
            error.strerror or str(error),
            "free some space or check the folder",
            Exit.FAILED,
        ) from error


def template() -> str:
    """Template with every key, its meaning and default, all commented out."""
    lines = [TEMPLATE_HEAD]
    section = ""
    for row in schema().values():
        if row.section != section:
            section = row.section
            lines.append(f"[{section}]")
        lines += [f"# {row.doc}", f"# {row.name.partition('.')[2]} = {toml_text(row.default)}", ""]
    return "\n".join(lines)


def toml_text(value: Scalar) -> str:
    if value is None:
        return '"auto"'
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()
