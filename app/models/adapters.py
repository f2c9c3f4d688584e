"""Names that stand for another model: LoRA adapters of the box, and aliases with parameters.

Files of adapters are copied to a folder that is named by a digest of their content, so they never change
while a request or a cached block depends on them.
"""

import contextlib
import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from llmbox.engine.checkpoint.adapter import CONFIG, WEIGHTS, Adapter, read_adapter
from llmbox.engine.checkpoint.files import open_regular
from llmbox.engine.checkpoint.safetensors import shown
from llmbox.engine.errors import ModelError

from ..errors import CliError, Exit
from .catalog import BUILTIN, HUB_ID, ModelRef, check_name, resolve
from .registry import Alias, NameLookup, Registry, parse_parameters

MERGE_JOB: Final = "llmbox.engine.quantize.merge_adapter"
CHECK_SECONDS: Final = 120.0
_CHUNK: Final = 1 << 20
_PART: Final = ".part-"
ABANDONED_SECONDS: Final = 3600.0
"""Age of an unfinished copy that nobody finishes any more."""


@dataclass(frozen=True, slots=True)
class AddedAdapter:
    """Adapter as lists show it. `rank`: its largest; `nbytes` in 16 bits."""

    name: str
    base: str
    rank: int
    nbytes: int
    modules: int
    problem: str = ""
    """Reason why its files cannot be read; empty where they can."""


def list_adapters(registry: Registry, names: NameLookup | None = None) -> list[AddedAdapter]:
    """List the adapters by name, with what their files say. `names`: read before."""
    names = names or registry.read()
    found = []
    for name, alias in sorted(names.aliases.items()):
        if not alias.adapter:
            continue
        try:
            adapter = read_adapter(registry.adapters_home / alias.adapter)
        except ModelError as error:
            found.append(AddedAdapter(name, alias.model, 0, 0, 0, str(error)))
        else:
            found.append(_added(name, alias.model, adapter))
    return found


def add_adapter(
    registry: Registry,
    environ: Mapping[str, str],
    name: str,
    folder: Path,
    base: str | None,
    memory: Mapping[str, ModelRef] | None = None,
    *,
    may_replace: bool = False,
) -> AddedAdapter:
    """Check an adapter against its base, copy it, and give it a name. Takes seconds.

    `base` None: the model that the adapter names. Raises CliError, with the message that
    loading such a folder would give.
    """
    names = registry.read()
    check_name(name, "choose another name")
    _require_free(name, names, memory or {}, may_replace=may_replace)
    source = _absolute(folder)
    adapter = _parsed(source)
    ref = resolve_base(adapter, base, environ, names, memory)
    _check(ref, source)
    known = ref.name if ref.name in names.directories or ref.source != "directory" else ref.ref
    with _copied(source, registry.adapters_home) as (part, digest):

        def edit(names: NameLookup) -> NameLookup:
            """Under the registry's lock: no removal of the same files comes between the two."""
            _require_free(name, names, memory or {}, may_replace=may_replace)
            _put(part, registry.adapters_home / digest)
            return replace(names, aliases={**names.aliases, name: Alias(known, adapter=digest)})

        registry.change(edit)
    return _added(name, known, adapter)


def is_from_hub(source: str) -> bool:
    """Return whether an adapter's source is a name of the hub, as far as its text says."""
    match = HUB_ID.fullmatch(source)
    return match is not None and not match["quantization"] and ".." not in source and "--" not in source


def require_base(
    registry: Registry,
    environ: Mapping[str, str],
    name: str,
    config: Mapping[str, object],
    base: str | None,
    memory: Mapping[str, ModelRef] | None = None,
) -> None:
    """Raise CliError if an adapter with this adapter_config.json could not be added: its name is taken, or
    its base is not on this disk.
    """
    names = registry.read()
    check_name(name, "choose another name")
    _require_free(name, names, memory or {}, may_replace=False)
    result = config.get("base_model_name_or_path")
    _find_base(result if isinstance(result, str) else "", base, environ, names, memory)


def remove_adapter(registry: Registry, name: str) -> None:
    """Forget an adapter and delete its copied files. Raises CliError (exit 4)."""
    alias = registry.read().aliases.get(name)
    if alias is None or not alias.adapter:
        raise CliError(f"no adapter {name}", "it is not in the list", "llmbox lora ls", Exit.NOT_FOUND)
    registry.remove_alias(name)


def find_adapter(registry: Registry, text: str) -> tuple[Path, str | None]:
    """Return the folder and the base of a name, or a folder that was not added. Raises CliError."""
    alias = registry.read().aliases.get(text)
    if alias is not None and alias.adapter:
        return registry.adapters_home / alias.adapter, alias.model
    folder = _absolute(Path(text))
    if os.path.isdir(folder):  # noqa: PTH112 - False for what cannot be a path, too
        return folder, None
    raise CliError(
        f"no adapter {text}", "it is neither in the list nor a folder", "llmbox lora ls", Exit.NOT_FOUND
    )


def resolve_base(
    adapter: Adapter,
    base: str | None,
    environ: Mapping[str, str],
    names: NameLookup,
    memory: Mapping[str, ModelRef] | None = None,
) -> ModelRef:
    """Return the base model: the one that is named, or else that of the adapter's config. Raises CliError."""
    return _find_base(adapter.base, base, environ, names, memory)


def _find_base(
    known_base: str,
    base: str | None,
    environ: Mapping[str, str],
    names: NameLookup,
    memory: Mapping[str, ModelRef] | None,
) -> ModelRef:
    text = base or known_base
    if not text:
        raise CliError(
            "the base is not known", f"{CONFIG} does not name it", "name it: --base MODEL", Exit.USAGE
        )
    if text in names.aliases and names.aliases[text].adapter:
        raise CliError(f"{text} is an adapter itself", "a base is a model", "--base MODEL", Exit.USAGE)
    try:
        return resolve(text, environ, names, memory)
    except CliError as error:
        if base is None:
            fetch = f"fetch it: llmbox pull {text}, or " if HUB_ID.fullmatch(text) else ""
            error.fix = f"{fetch}name the base, which is on this disk: --base MODEL; see llmbox ls"
        raise
    except (OSError, RuntimeError, ValueError) as error:  # names in a config that cannot be paths
        why = f"its name cannot be read: {getattr(error, 'strerror', None) or error}"
        raise CliError(f"no base {shown(text)}", why, "--base MODEL; see llmbox ls", Exit.NOT_FOUND) from None


def _require_free(name: str, names: NameLookup, memory: Mapping[str, ModelRef], *, may_replace: bool) -> None:
    alias = names.aliases.get(name)
    if alias is not None and alias.adapter and may_replace:
        return
    taken = "a model" if alias is None else "an adapter" if alias.adapter else "an alias"
    if alias is not None or name == BUILTIN or name in names.directories or name in memory:
        fix = f"llmbox lora rm {name}, then again" if taken == "an adapter" else "choose another name"
        raise CliError(f"the name {name} is taken", f"it is {taken}'s", fix, Exit.CONFLICT)


def _absolute(folder: Path) -> Path:
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:  # ~nobody
        raise _refused(f"{folder} is not a folder: {error}") from None


def _parsed(folder: Path) -> Adapter:
    try:
        return read_adapter(folder)
    except ModelError as error:
        raise _refused(str(error)) from None


def _refused(why: str) -> CliError:
    return CliError(
        "this adapter cannot be used", why, "docs/adapters.md lists what is supported", Exit.FAILED
    )


def _check(ref: ModelRef, folder: Path) -> None:
    """Check an adapter against its base in a separate process, as this one imports no torch."""
    command = [sys.executable, "-P", "-m", MERGE_JOB, str(ref.path), str(folder)]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refused(f"it could not be checked: {error}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if "error" in last:
        raise _refused(last["error"]["message"])
    if "report" not in last:
        result = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise _refused(f"it could not be checked: {result[0]}")


@contextlib.contextmanager
def _copied(source: Path, home: Path) -> Iterator[tuple[Path, str]]:
    """Copy an adapter's two files to a folder that is gone afterwards; yield it with the digest of the files.
    Raises CliError.
    """
    part = home / f"{_PART}{os.getpid()}-{os.urandom(4).hex()}"
    digest = hashlib.sha256()
    try:
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            _remove_abandoned(home)
            part.mkdir(mode=0o700)
            for name in (CONFIG, WEIGHTS):
                _copy(source / name, part / name, digest)
            read_adapter(part)  # what was copied, not what was checked before
        except (OSError, ModelError) as error:
            raise _not_kept(error) from None
        yield part, digest.hexdigest()[:32]
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put(part: Path, kept: Path) -> None:
    """Move a copy to its place, unless a whole one is there. Raises CliError."""
    names = (CONFIG, WEIGHTS)
    try:
        if kept.is_dir() and set(filecmp.cmpfiles(part, kept, names, shallow=False)[0]) != set(names):
            shutil.rmtree(kept)  # damaged, or half removed
        if not kept.is_dir():
            part.rename(kept)
    except OSError as error:
        raise _not_kept(error) from None


def _not_kept(error: Exception) -> CliError:
    return _refused(f"its files cannot be kept: {error}")


def _remove_abandoned(home: Path) -> None:
    """Remove copies that were never finished."""
    for path in home.glob(f"{_PART}*"):
        with contextlib.suppress(FileNotFoundError):  # finished meanwhile
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _copy(source: Path, target: Path, digest: "hashlib._Hash") -> None:
    with open_regular(source) as read, target.open("xb") as written:
        while data := read.read(_CHUNK):
            digest.update(data)
            written.write(data)
        digest.update(b"\0")
        written.flush()
        os.fsync(written.fileno())


def _added(name: str, base: str, adapter: Adapter) -> AddedAdapter:
    modules = len(adapter.targets) + len(adapter.saved)
    return AddedAdapter(name, base, adapter.rank, adapter.nbytes, modules)


def set_alias(
    registry: Registry,
    environ: Mapping[str, str],
    name: str,
    ref: str,
    parameters: Sequence[str],
    memory: Mapping[str, ModelRef] | None = None,
) -> Alias:
    """Create or replace the alias `name` of the model `ref`.

    `parameters` are `k=v`, `memory` is as for `resolve`. Raises CliError for invalid names or values.
    """
    names = registry.read()
    check_name(name)
    if ref in names.aliases:
        raise CliError(
            f"{ref} is an alias itself",
            f"it stands for {names.aliases[ref].model}",
            f"llmbox alias set {name} {names.aliases[ref].model}",
            Exit.USAGE,
        )
    target = resolve(ref, environ, names, memory)
    if name in names.aliases and names.aliases[name].adapter:
        raise CliError(f"{name} is an adapter", "an alias would replace it", "choose another", Exit.CONFLICT)
    holder = (memory or {}).get(name)
    if name == "builtin" or name in names.directories or (holder is not None and holder.path != target.path):
        raise CliError(f"{name} is a model's name", "an alias would hide it", "choose another", Exit.CONFLICT)
    # The name of a directory that was not adopted is forgotten when it is unloaded.
    known = target.name if target.name in names.directories else target.ref
    alias = Alias(known, parse_parameters(list(parameters)))
    registry.set_alias(name, alias)
    return alias
