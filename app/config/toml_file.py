"""Edits of the user's TOML file that keep its comments. The file is replaced atomically."""

from collections.abc import MutableMapping
from pathlib import Path

import tomlkit

from ..errors import CliError, Exit
from ..util.atomic_file import write_whole
from .loader import parse
from .paths import private_dir
from .schema import Scalar, SettingSpec, schema

TEMPLATE_HEAD = """\
# Settings of llmbox. A line that begins with # shows a default; remove the # to change it.
# Precedence: flag, LLMBOX_SECTION_KEY, this file, /etc/llmbox/config.toml, built-in.
"""


def set_value(path: Path, row: SettingSpec, value: Scalar) -> None:
    """Write one checked value. Raises CliError if the file was invalid before."""
    text = path.read_text("utf-8") if path.exists() else ""
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
