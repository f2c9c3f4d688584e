"""Compiles the kernels once and keeps the library in the cache. No torch: `doctor` asks too.

The file's name holds a digest of everything it was made from (sources, flags, compiler), and its end a digest
of its content: another version is another file, and a damaged one is noticed and built again.
"""

import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .levels import Level

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "native"
COMMON_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
SLOWEST = ("attention_int8", "attention_f32", "library", "quant")
"""Files that are compiled first, so that none of them is left alone at the end."""
MOST_AT_ONCE = 8
"""Compilers; one takes 0.25 GB."""
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300
KERNEL_CACHE = "LLMBOX_KERNEL_CACHE"
"""Environment variable: the folder to keep the libraries in."""
DIGEST_BYTES = 32
UNFINISHED = "unfinished-"


class NativeUnavailable(Exception):  # noqa: N818 - named for what the user reads
    """Why the C++ kernels cannot run here."""


def library_path(level: Level) -> Path:
    """The compiled library, built if it is not in the cache. Raises NativeUnavailable.

    Where the cache cannot be written, it goes to a private temporary folder.
    """
    compiler = find_compiler()
    name = f"{level.name}-{source_digest(level, compiler)[:20]}.so"
    folder = cache_folder()
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
        if not is_intact(path):  # another process may just have made it
            for left in folder.glob(f"{UNFINISHED}*"):  # by who was killed while it compiled
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            build(compiler, level, path)
    return path


def find_compiler() -> list[str]:
    """The command, from $CXX or the first of the usual names."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in [chosen[0]] if chosen else COMPILERS:
        if found := shutil.which(name):
            return [found, *chosen[1:]]
    wanted = f"CXX={chosen[0]}" if chosen else "c++"
    raise NativeUnavailable(f"no C++ compiler found ({wanted}): apt install g++")


def can_build() -> bool:
    """Without trying: a compiler is there, and nobody asked for other kernels."""
    if os.environ.get("LLMBOX_KERNELS", "cpu").split()[0] != "cpu":
        return False
    try:
        find_compiler()
    except NativeUnavailable:
        return False
    return True


def cache_folder() -> Path:
    base = os.environ.get(KERNEL_CACHE)
    if base:
        return Path(base)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "llmbox" / "kernels"


def temporary_folder() -> Path:
    """Kept until the system clears it: the next process need not compile again."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"llmbox-kernels-{os.geteuid()}"


def layout(level: Level) -> str:
    """Names the layout of packed weights: the same for the same sources, whatever compiled them."""
    digest = hashlib.sha256(level.name.encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"{level.name} {digest.hexdigest()[:20]}"


def source_digest(level: Level, compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (*compiler, compiler_version(compiler), *COMMON_FLAGS, *level.flags):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def compiler_version(compiler: list[str]) -> str:
    try:
        return subprocess.run(  # noqa: S603 - the user's own compiler
            [*compiler, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler[0]} does not run: {error}") from None


def is_intact(path: Path) -> bool:
    """There, ours or the system's, and with the digest at its end that its content has."""
    try:
        status = path.stat()
        if status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
            return False
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return hashlib.sha256(body).digest() == digest


def build(compiler: list[str], level: Level, path: Path) -> None:
    log.info("compiling the CPU kernels for %s: once, some seconds", level.name)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
        made = Path(folder) / path.name
        compile_to(compiler, level, made)
        body = made.read_bytes()
        # What follows the sections of an ELF file is not looked at by the loader.
        made.write_bytes(body + hashlib.sha256(body).digest())
        made.chmod(0o700)
        made.replace(path)


def compile_to(compiler: list[str], level: Level, path: Path) -> None:
    """Each file apart, as many at once as there are cores; object files stay beside `path`."""
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: (source.stem not in SLOWEST, source.name))
    objects = [path.with_name(f"{source.stem}.o") for source in sources]
    common = [*compiler, *COMMON_FLAGS, *level.flags]

    def compile_one(source: Path, to: Path) -> None:
        run([*common, "-c", str(source), "-o", str(to)], level)

    workers = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_AT_ONCE))
    try:
        list(workers.map(compile_one, sources, objects))
    finally:
        workers.shutdown(cancel_futures=True)
    run([*common, "-shared", *map(str, objects), "-o", str(path)], level)


def run(command: list[str], level: Level) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - the user's own compiler
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NativeUnavailable(f"{command[0]} cannot compile the kernels for {level.name}: {first}")


def private_folder(folder: Path) -> None:
    """A library that others could replace would run as us."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
        raise NativeUnavailable(f"the kernel cache {folder} can be written by others: chmod 700 {folder}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
