"""From the C++ sources to a library: each file apart, as many at once as there are cores. No torch."""

import errno
import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from .levels import Level

SOURCES = Path(__file__).parent / "native"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300
MOST_AT_ONCE = 8
"""Compilers; one takes 0.25 GB."""
SLOWEST = ("attention_int8", "attention_f32", "library", "quant")
"""Files that begin first, so that none of them is left alone at the end."""
DIGITS = 20
"""Of a digest, in names."""


class NativeUnavailable(Exception):  # noqa: N818 - named for what the user reads
    """Why the C++ kernels cannot run here."""


def find_compiler() -> list[str]:
    """The command, from $CXX or the first of the usual names."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for name in [chosen[0]] if chosen else COMPILERS:
        if found := shutil.which(name):
            return [found, *chosen[1:]]
    wanted = f"CXX={chosen[0]}" if chosen else "c++"
    raise NativeUnavailable(f"no C++ compiler found ({wanted}): apt install g++")


def compiler_version(compiler: list[str]) -> str:
    try:
        return subprocess.run(  # noqa: S603 - the user's own compiler
            [*compiler, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{compiler[0]} does not run: {error}") from None


def digest_sources(*parts: str) -> str:
    """Names the sources and `parts` together."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:DIGITS]


def layout(level: Level) -> str:
    """Names the layout of packed weights: the same for the same sources, whatever compiled them."""
    return f"{level.name} {digest_sources(level.name)}"


def compile_library(compiler: list[str], level: Level, path: Path, link: tuple[str, ...] = ()) -> None:
    """Makes `path`; object files stay beside it. `link`: more for the linker.

    Raises NativeUnavailable; OSError where the disk is full.
    """
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: (source.stem not in SLOWEST, source.name))
    objects = [path.with_name(f"{source.stem}.o") for source in sources]
    common = [*compiler, *FLAGS, *level.flags]

    def compile_one(source: Path, to: Path) -> None:
        run([*common, "-c", str(source), "-o", str(to)], level)

    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - seldom needed, and slow to import

    workers = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_AT_ONCE))
    try:
        list(workers.map(compile_one, sources, objects))
    finally:
        workers.shutdown(cancel_futures=True)
    run([*common, "-shared", *map(str, objects), *link, "-o", str(path)], level)


def run(command: list[str], level: Level) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - the user's own compiler
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NativeUnavailable(f"{command[0]} cannot compile the kernels for {level.name}: {first}")
