"""Kernel libraries: prebuilt ones of the wheel, and those that are compiled once and kept in the cache.

Torch-free, as `doctor` uses it. `packaging/kernel_libraries.py` makes the prebuilt ones. A file's name has a
digest of its inputs (sources and flags; in the cache the compiler too), and the file ends with one of its
content: one of other sources is never loaded, and a damaged one is noticed.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from .compiling import (
    DIGITS,
    FLAGS,
    NativeUnavailable,
    Progress,
    compile_library,
    compiler_version,
    digest_sources,
    find_compiler,
)
from .isa import Level, cache_folder, usable_levels

log = logging.getLogger(__name__)

UNFINISHED = "unfinished-"
DIGEST_BYTES = 32
FOLDER = Path(__file__).parent / "prebuilt"
compile_progress: ContextVar[Progress] = ContextVar("compile_progress", default=lambda _done, _total: None)
"""Progress callback of a compile, whoever asked for the kernels."""


def is_built(level: Level) -> bool:
    """Return whether there is a library of these sources, so that nothing has to be compiled."""
    if find_prebuilt(level)[0] is not None:
        return True
    try:
        return is_intact(cache_folder() / library_name(level, find_compiler()))
    except NativeUnavailable:
        return False


def library_name(level: Level, compiler: list[str]) -> str:
    digest = digest_sources(*compiler, compiler_version(compiler), *FLAGS, *level.flags)
    return f"{level.name}-{digest}.so"


def library_path(level: Level) -> Path:
    """Return the path of the compiled library, built if it is not in the cache. Raises NativeUnavailable.

    If the cache cannot be written, the library goes to a private temporary folder.
    """
    compiler = find_compiler()
    name, folder = library_name(level, compiler), cache_folder()
    try:
        return library_in(folder, name, level, compiler)
    except OSError as error:
        temporary = temporary_folder()
        log.warning(
            "the kernel cache %s cannot be used (%s): the compiled kernels go to %s instead",
            folder,
            error.strerror,
            temporary,
        )
    try:
        return library_in(temporary, name, level, compiler)
    except OSError as error:
        raise NativeUnavailable(f"nor can {temporary} be used: {error.strerror}") from None


def library_in(folder: Path, name: str, level: Level, compiler: list[str]) -> Path:
    path = folder / name
    if is_intact(path):
        return path
    private_folder(folder)
    with locked(folder / "build.lock"):
        if not is_intact(path):  # another process may just have built it
            for left in folder.glob(f"{UNFINISHED}*"):  # left by a process killed while it compiled
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            build(compiler, level, path)
    return path


def find_compiled(level: Level, folder: Path) -> Path | None:
    """Return a cached library for `level`, if there is one. Its sources may be older than today's."""
    return next((path for path in folder.glob(f"{level.name}-{'?' * DIGITS}.so") if is_intact(path)), None)


def native_expected() -> bool:
    """Return whether the C++ kernels are expected to work, without loading them.

    True if there is a prebuilt library or a compiler, and LLMBOX_KERNELS does not name other kernels.
    """
    return os.environ.get("LLMBOX_KERNELS", "cpu").split()[0] == "cpu" and native_obtainable()


def native_obtainable() -> bool:
    """Return whether there is a prebuilt library or a compiler for the C++ kernels."""
    try:
        find_compiler()
    except NativeUnavailable:  # the path of a prebuilt library has a digest of all sources: looked up last
        return any(prebuilt_path(level).exists() for level in usable_levels())
    return True


def temporary_folder() -> Path:
    """Return the fallback folder. The system clears it, so until then the next process need not compile
    again.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"llmbox-kernels-{os.geteuid()}"


def is_intact(path: Path) -> bool:
    """Return whether the file exists, belongs to us or to root, and matches the digest at its end."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o022 and is_sealed(path)


def build(compiler: list[str], level: Level, path: Path) -> None:
    log.info("compiling the CPU kernels for %s, once for this machine", level.name)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
        made = Path(folder) / path.name
        compile_library(compiler, level, made, progress=compile_progress.get())
        seal(made)
        made.chmod(0o700)
        made.replace(path)


def private_folder(folder: Path) -> None:
    """Create a private folder: a library that others could replace would run with our rights. Raises
    NativeUnavailable.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
        raise NativeUnavailable(f"the kernel cache {folder} can be written by others: chmod 700 {folder}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            compile_progress.get()(0, 0)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def seal(path: Path) -> None:
    body = path.read_bytes()
    path.write_bytes(body + hashlib.sha256(body).digest())


def is_sealed(path: Path) -> bool:
    """Return whether the file exists and is undamaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def prebuilt_path(level: Level) -> Path:
    """Return the path of the library of these sources."""
    return FOLDER / f"{level.name}-{digest_sources(*FLAGS, *level.flags)}.so"


def find_prebuilt(level: Level) -> tuple[Path | None, str]:
    """Return (prebuilt library for `level` or None, reason why it cannot be used).

    Owner and mode are not checked: whoever could replace the file could replace the Python code beside it.
    """
    path = prebuilt_path(level)
    if is_sealed(path):
        return path, ""
    if path.exists():
        return None, f"the prebuilt library {path} is damaged"
    others = [*FOLDER.glob(f"{level.name}-{'?' * DIGITS}.so")]
    return None, f"the prebuilt library {others[0]} is of other sources" if others else ""
