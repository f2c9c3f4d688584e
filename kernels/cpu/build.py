"""Kernel libraries: compilation of the C++ sources in parallel parts, one for each core; prebuilt libraries
of the wheel, and those that are compiled once and kept in the cache.

Torch-free, as `doctor` uses it. `packaging/kernel_libraries.py` makes the prebuilt ones. A file's name has a
digest of its inputs (sources and flags; in the cache the compiler too), and the file ends with one of its
content: one of other sources is never loaded, and a damaged one is noticed.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from .isa import Level, cache_folder, usable_levels, user_cache_folder

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
TIMEOUT_S = 1500
"""Most seconds of one compiler at the first start. It computes for some twenty, perhaps on a tenth of a core.
The daemon ends a load sooner whose compiler stands still (`Watchdog`). A wheel's build has its own limit."""
MOST_AT_ONCE = 8
"""Most compilers at a time; one takes 0.25 to 0.4 GB."""
SECONDS = {
    "gguf_block_gemm": 5.8, "moe": 4.6, "library": 3.7, "quant_gemm": 3.4, "linear": 2.9, "recurrent": 1.5,
    "weight_packing": 1.4, "attention_bf16": 1.2, "attention_f32": 1.1, "attention_int8": 1.0,
    "quant_linear": 0.9, "sample": 0.9, "pool": 0.1, "checksums": 0.1,
}  # fmt: skip
"""Seconds of each file beside 1 s for the system's headers, measured for AVX-512 on an EPYC."""
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
        run([*common, "-c", str(whole), "-o", str(to)], level, timeout, lifeline)

    from concurrent.futures import ThreadPoolExecutor, as_completed  # noqa: PLC0415 - seldom needed, slow

    workers = ThreadPoolExecutor(len(parts))
    lifeline, held = os.pipe()
    try:
        work = [workers.submit(compile_one, *each) for each in zip(parts, objects, strict=True)]
        for done, each in enumerate(as_completed(work), start=1):
            each.result()
            progress(done, steps)
        run([*common, "-shared", *map(str, objects), *link, "-o", str(path)], level, timeout, lifeline)
    finally:
        os.close(held)  # after an error or an interrupt: the compilers that still run end now
        workers.shutdown(cancel_futures=True)
        os.close(lifeline)
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


END_WITH_LIFELINE = """
exec 3<&0
"$@" 3<&- & compiler=$!
{ read -r _ <&3; kill -KILL 0; } & guard=$!
wait $compiler; status=$?
kill -KILL $guard
exit $status
"""
"""Shell script that runs a command, and kills its group once standard input ends. Engines ignore SIGTERM."""


def run(command: list[str], level: Level, timeout: float, lifeline: int) -> None:
    """Run a compiler with its subprocesses as one process group: they end by the timeout, or as soon as the
    other end of the pipe `lifeline` is closed, also by the death of this process.

    A compiler is a driver that starts others, which would compute for minutes after the driver was killed.

    Raises NativeUnavailable, or OSError if the disk is full.
    """
    try:
        done = run_in_group(command, timeout, lifeline)
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


def run_in_group(command: list[str], timeout: float, lifeline: int) -> subprocess.CompletedProcess[str]:
    """Return what the command printed and its status. Raises OSError and subprocess.TimeoutExpired."""
    with subprocess.Popen(  # noqa: S603 - the user's own compiler
        ["/bin/sh", "-c", END_WITH_LIFELINE, "sh", *command],
        stdin=lifeline,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


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
        name, folder = library_name(level, find_compiler()), cache_folder()
    except NativeUnavailable:
        return False
    return is_intact(folder / name) or read_shared(name, folder) is not None


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
            if (content := read_shared(name, folder)) is not None:
                keep(path, lambda made: made.write_bytes(content))
            else:
                build(compiler, level, path)
    return path


def read_shared(name: str, folder: Path) -> bytes | None:
    """Return the library from the user's own cache where `folder` is another one, as that of a new
    `--data-dir`. None if there is none, or one that others could have written.
    """
    try:
        path = user_cache_folder() / name
        if path.parent == folder or not (is_ours(path.parent) and is_ours(path)):
            return None
        content = path.read_bytes()
    except (OSError, RuntimeError):  # the user may have no home
        return None
    return content if is_whole(content) else None


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
        return is_ours(path) and is_sealed(path)
    except OSError:
        return False


def is_ours(path: Path) -> bool:
    """Return whether a file or a folder belongs to us or to root, and nobody else can write to it. Raises
    OSError.
    """
    status = path.stat()
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o022


def build(compiler: list[str], level: Level, path: Path) -> None:
    def make(made: Path) -> None:
        compile_library(compiler, level, made, progress=compile_progress.get())
        seal(made)

    log.info("compiling the CPU kernels for %s, once for this machine", level.name)
    keep(path, make)


def keep(path: Path, make: Callable[[Path], object]) -> None:
    """Have a library made in a folder beside `path`, and put it there once it is whole."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as folder:
        made = Path(folder) / path.name
        make(made)
        made.chmod(0o700)
        made.replace(path)


def private_folder(folder: Path) -> None:
    """Create a private folder: a library that others could replace would run with our rights. Raises
    NativeUnavailable.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_ours(folder):
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
        return is_whole(path.read_bytes())
    except OSError:
        return False


def is_whole(content: bytes) -> bool:
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
