"""C++ programs of tests, kept between runs: compiled again only after a change of sources or compiler."""

import contextlib
import hashlib
import os
import shlex
import subprocess
import time
from functools import cache
from pathlib import Path

from llmbox.kernels.cpu import build
from llmbox.kernels.cpu.isa import KERNEL_CACHE, Level
from support.lanes import NIGHTLY

KEPT_S = 7 * 24 * 3600
"""Seconds after its last use until a kept file is deleted."""


@cache
def compile_program(driver: Path, flags: tuple[str, ...], sources: Path = build.SOURCES) -> Path:
    """Return the program of `driver`, with headers from `sources`. A night begins with none.

    A program is found by its flags, the compiler's version, all files of `sources` and those beside the
    driver, whatever folder they are in: other trees with the same files share it. Raises CalledProcessError
    with the compiler's words in `stderr`.
    """
    compiler = build.find_compiler()
    command = [*compiler, *flags, "-I", str(sources), str(driver)]
    digest = hashlib.sha256("\0".join([*compiler, *flags, build.compiler_version(compiler)]).encode())
    beside = [path for path in driver.parent.iterdir() if path.suffix in {".h", ".cpp"}]
    for folder, files in ((driver.parent, beside), (sources, sources.rglob("*"))):
        for path in sorted(path for path in files if path.is_file()):
            digest.update(f"\0{path.relative_to(folder)}\0".encode() + path.read_bytes())
    folder = _folder()
    program = folder / f"{driver.stem}-{digest.hexdigest()[:20]}"
    if NIGHTLY or not program.exists():
        made = program.with_name(f"{program.name}.{os.getpid()}")
        try:
            subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=True)
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr[-2000:])
            raise
        made.replace(program)
    os.utime(program)
    _delete_unused(folder)
    return program


KEEPING = """\
#!/bin/sh
before= source= made=
for each in "$@"; do
  case $before in -c) source=$each ;; -o) made=$each ;; esac
  before=$each
done
[ -n "$source" ] || exec {command} "$@" -O0
kept={kept}-$(sed 's|"/.*/native/|"|' "$source" | sha256sum | cut -c 1-20).o
if [ -e "$kept" ]; then touch "$kept"; exec cp "$kept" "$made"; fi
{command} "$@" -O0 && cp "$made" "$kept.$$" && mv "$kept.$$" "$kept"
"""


def keeping_compiler(path: Path, level: Level) -> Path:
    """Write a compiler of the kernels' sources for `level` to `path`.

    It does not optimize, which takes a third of the time, and keeps object files between runs but those of a
    night.
    """
    compiler = build.find_compiler()
    stem = Path(build.library_name(level, compiler)).stem
    kept = (path.parent if NIGHTLY else _folder()) / f"unoptimized-{stem}"
    path.write_text(KEEPING.format(command=shlex.join(compiler), kept=shlex.quote(str(kept))))
    path.chmod(0o755)
    return path


def _folder() -> Path:
    folder = Path(os.environ[KERNEL_CACHE]) / "programs"
    build.private_folder(folder)
    return folder


def _delete_unused(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()
