"""The kernels of every instruction set under AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import subprocess
from pathlib import Path

import pytest

from llmbox.kernels.cpu.isa import Level, usable_levels
from support.compiled_programs import compile_program
from support.lanes import first_in_the_suite

DRIVER = Path(__file__).parent / "sanitized.cpp"
FLAGS = ("-std=c++20", "-O0", "-g1", "-pthread", "-ffp-contract=off", "-w")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SILENT = ("-fsanitize-undefined-trap-on-error",)
"""Undefined behavior ends the program without a word, which takes a third less time to compile."""
OPTIONS = (
    "detect_leaks=0",  # the pool lives as long as the process
    "max_malloc_fill_size=1073741824",
    "malloc_fill_byte=255",  # NaN in both dtypes: new memory that is read before it is written shows
)


@pytest.mark.slow
@pytest.mark.parametrize("level", first_in_the_suite(usable_levels()), ids=lambda level: level.name)
def test_odd_shapes_stay_inside_their_buffers(level: Level) -> None:
    try:
        done = run(level, SILENT)
    except subprocess.CalledProcessError as error:
        if "cannot find" in error.stderr and "san" in error.stderr:
            pytest.skip("this compiler comes without sanitizers")
        raise
    if done.stdout != "clean\n":
        told = run(level)
        pytest.fail(
            f"ended with {done.returncode}\n{done.stderr[-2000:]}\n{told.stdout}{told.stderr[-4000:]}"
        )


def run(level: Level, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    program = compile_program(DRIVER, (*FLAGS, *SANITIZERS, *more, *level.flags))
    env = {**os.environ, "ASAN_OPTIONS": ":".join(OPTIONS)}
    env.pop("LD_PRELOAD", None)
    return subprocess.run([str(program)], capture_output=True, text=True, env=env, timeout=300)
