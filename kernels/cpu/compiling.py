"""Compilation of the C++ sources to a library, in parallel parts, one for each core. Torch-free."""

import errno
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .isa import Level

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
"""Most seconds of one compiler at the first start; a wheel's build takes its own limit."""
MOST_AT_ONCE = 8
"""Most compilers at a time; one takes 0.25 to 0.4 GB."""
SECONDS = {
    "quant_linear": 3.0, "moe": 3.0, "sample": 2.1, "library": 1.9, "weight_packing": 1.9,
    "attention_f32": 1.7, "attention_int8": 1.7, "recurrent": 1.5, "linear": 1.3, "attention_bf16": 1.2,
    "pool": 0.4,
}  # fmt: skip
"""Compile time of each file beside 1.2 s for the system's headers, measured on a Xeon for AMX."""
DIGITS = 20
"""Digits of a digest in file names."""


Progress = Callable[[int, int], None]
"""(finished steps, all steps) of a compile; (0, 0) while another process compiles the same."""


class NativeUnavailable(Exception):  # noqa: N818 - named for what the user reads
    """The C++ kernels cannot run here; the message says why."""


def find_compiler() -> list[str]:
    """Return the compiler command: $CXX, or the first of the usual names. Raises NativeUnavailable."""
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
    """Return a digest of the sources and `parts`."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        name = source.relative_to(SOURCES).as_posix()
        digest.update(name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:DIGITS]


def layout(level: Level) -> str:
    """Return the identifier of the packed layout: the same for the same sources, whatever compiled them."""
    return f"{level.name} {digest_sources(level.name)}"


def compile_library(
    compiler: list[str],
    level: Level,
    path: Path,
    link: tuple[str, ...] = (),
    progress: Progress = lambda _done, _total: None,
    timeout: float = TIMEOUT_S,
) -> None:
    """Compile the library to `path`; object files stay beside it.

    `link` has extra linker arguments, `timeout` is the seconds that one compiler may take.

    Raises NativeUnavailable, or OSError if the disk is full.
    """
    common = [*compiler, *FLAGS, *level.flags, "-I", str(SOURCES)]
    parts = split_sources(min(len(os.sched_getaffinity(0)), MOST_AT_ONCE))
    objects = [path.with_name(f"part{number}.o") for number in range(len(parts))]

    steps = len(parts) + 1  # the last one links
    progress(0, steps)

    def compile_one(sources: list[Path], to: Path) -> None:
        whole = to.with_suffix(".cpp")
        whole.write_text("".join(f'#include "{source}"\n' for source in sources))
        run([*common, "-c", str(whole), "-o", str(to)], level, timeout)

    from concurrent.futures import ThreadPoolExecutor, as_completed  # noqa: PLC0415 - seldom needed, slow

    workers = ThreadPoolExecutor(len(parts))
    try:
        work = [workers.submit(compile_one, *each) for each in zip(parts, objects, strict=True)]
        for done, each in enumerate(as_completed(work), start=1):
            each.result()
            progress(done, steps)
    finally:
        workers.shutdown(cancel_futures=True)
    run([*common, "-shared", *map(str, objects), *link, "-o", str(path)], level, timeout)
    progress(steps, steps)


def split_sources(count: int) -> list[list[Path]]:
    """Split the sources into at most `count` parts of about equal cost. Each part parses the headers only
    once.
    """
    parts: list[list[Path]] = [[] for _ in range(count)]
    cost = [0.0] * count
    seconds = {source: SECONDS.get(source.stem, 1.0) for source in SOURCES.rglob("*.cpp")}
    for source in sorted(seconds, key=lambda source: (-seconds[source], source.name)):
        least = cost.index(min(cost))
        parts[least].append(source)
        cost[least] += seconds[source]
    return [part for part in parts if part]


def run(command: list[str], level: Level, timeout: float) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - the user's own compiler
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(
            f"{command[0]} did not finish the kernels for {level.name} in {timeout:.0f} s"
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{command[0]} does not run: {error}") from None
    if done.returncode:
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NativeUnavailable(f"{command[0]} cannot compile the kernels for {level.name}: {first}")
