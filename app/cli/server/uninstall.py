"""`llmbox uninstall`: removes llmbox's files from this box, except models, after listing them."""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from ...diagnostics.systemd import quote_argument, remove_unit, unit_file
from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, pass_program
from ...util import formatting
from .. import output
from ..output import require_consent
from .lifecycle import stop

PACKAGE_HOME = Path("/opt/llmbox")
"""Environment of the .deb and the .rpm (packaging/release.py)."""


@dataclass(frozen=True, slots=True)
class UninstallItem:
    what: str
    path: Path
    size: int


@click.command(cls=Command)
@click.option(
    "--models", is_flag=True, help="Also the models in the Hugging Face cache, which others may use."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; needs --yes.")
@pass_program
def uninstall(program: Program, *, models: bool, yes: bool, as_json: bool) -> None:
    """Remove settings, keys, logs, caches and services of llmbox. Models stay without --models.

    Remove the program itself with the tool that installed it.
    """
    items = list(_items(program, with_models=models))
    if not as_json:
        _announce(program, items, with_models=models)
    if not items:
        return
    require_consent("Remove all of it?", "nothing was removed", yes=yes, as_json=as_json)
    running = find_running(program.paths)
    if running is not None:
        stop(program, running, now=False, timeout=None)
    for system in _services(program):
        remove_unit(program, system=system)
    for item in items:
        _delete(item.path)
    _drop_empty_folders(program)
    freed = sum(item.size for item in items)
    if as_json:
        rows = [{"what": item.what, "path": str(item.path), "size": item.size} for item in items]
        output.write_json("uninstall", {"removed": rows, "freed": freed})
    else:
        output.say(f"Done: {formatting.size(freed)} freed. The program itself: {how_to_remove_program()}")


def _items(program: Program, *, with_models: bool) -> Iterator[UninstallItem]:
    """Yield the items that exist. Of a --data-dir that a user named only our own files are removed."""
    from ...models.catalog import hub_cache

    paths = program.paths
    found = [
        ("settings", paths.config_file),
        ("self-made certificate", paths.tls_dir),
        ("API keys", paths.keys_file),
        ("last-used times of keys", paths.keys_used_file),
        ("usage of keys", paths.keys_quota_file),
        ("aliases and adopted folders", paths.registry_file),
        ("settings before llmbox share", paths.share_file),
        ("secrets of MCP servers", paths.mcp_secrets_file),
        ("logs and request log", paths.state_dir),
        ("compiled kernels, repacked weights and KV cache", paths.cache_dir),
        ("sockets", paths.runtime_dir),
        *(
            (f"service ({'system' if each else 'user'})", unit_file(program, system=each))
            for each in _services(program)
        ),
    ]
    files = (paths.keys_file, paths.registry_file, paths.mcp_secrets_file)
    found += [("lock", file.with_suffix(".lock")) for file in files]
    copies = sorted(program.registry.adapters_home.glob("[0-9a-f]" * 32))
    found += [("copy of an adapter", folder) for folder in copies]
    if with_models:
        cache = hub_cache(program.environ)
        found += [("model", folder) for folder in sorted(cache.glob("models--*--*"))]
    for what, path in found:
        if path.exists() or path.is_symlink():
            yield UninstallItem(what, path, _size(path))


def _services(program: Program) -> list[bool]:
    """Return the scopes (True: the machine's) whose unit starts a daemon on these files, not on another
    --data-dir.
    """
    return [system for system in (False, True) if _is_ours(program, unit_file(program, system=system))]


def _is_ours(program: Program, unit: Path) -> bool:
    if not unit.is_file():
        return False
    text = unit.read_text("utf-8", "replace")
    if program.data_dir is None:
        return "--data-dir" not in text
    return f" {quote_argument(str(program.data_dir.absolute()))} " in text


def _size(path: Path) -> int:
    from ...hub.remove import folder_size

    return folder_size(path) if path.is_dir() else path.lstat().st_size


def _announce(program: Program, items: list[UninstallItem], *, with_models: bool) -> None:
    if not items:
        output.say("No files of llmbox were found.")
        return
    output.say("This goes:")
    for item in items:
        output.say(f"  {formatting.size(item.size):>9}  {item.what}: {item.path}")
    if (running := find_running(program.paths)) is not None:
        output.say(f"The daemon (pid {running.pid}) is stopped first.")
    if not with_models:
        from ...models.catalog import hub_cache

        output.say(f"Models stay: {hub_cache(program.environ)} (--models deletes them too).")


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(
            f"cannot remove {path}",
            error.strerror or str(error),
            "fix its owner or mode, then try again",
            Exit.DENIED,
        ) from error


def _drop_empty_folders(program: Program) -> None:
    paths = program.paths
    for folder in (program.registry.adapters_home, paths.data_dir, paths.config_file.parent):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def how_to_remove_program() -> str:
    """Return the command that removes the program, guessed from where it is installed."""
    place = Path(sys.prefix)
    if "uv" in place.parts and "tools" in place.parts:
        return "uv tool uninstall llmbox"
    if "pipx" in place.parts:
        return "pipx uninstall llmbox"
    if place == PACKAGE_HOME:
        return "apt remove llmbox" if shutil.which("apt") else "dnf remove llmbox"
    return f"{sys.executable} -m pip uninstall llmbox"
