"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on the best instruction set."""

import os
import subprocess
from pathlib import Path

import pytest

from llmbox.kernels.cpu import build
from llmbox.kernels.cpu.levels import usable_levels

DRIVER = Path(__file__).parent / "sanitized.cpp"
FLAGS = ("-std=c++20", "-O0", "-g", "-pthread", "-ffp-contract=off", "-w")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.slow
def test_odd_shapes_stay_inside_their_buffers(tmp_path: Path) -> None:
    program = tmp_path / "sanitized"
    level = usable_levels()[0]
    command = [
        *build.find_compiler(),
        *FLAGS,
        *SANITIZERS,
        *level.flags,
        "-I",
        str(build.SOURCES),
        str(DRIVER),
    ]
    compiled = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True)
    if "cannot find" in compiled.stderr and "san" in compiled.stderr:
        pytest.skip("this compiler comes without sanitizers")
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}  # the pool lives as long as the process
    env.pop("LD_PRELOAD", None)
    done = subprocess.run([str(program)], capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout == "clean\n", done.stdout + done.stderr[-4000:]
