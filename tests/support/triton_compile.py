"""Compiles kernels for a GPU that is not there: host code runs on CPU tensors, launches only compile.

What a launch would compile follows from its arguments as on a real machine: types, alignments, constants.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

HOPPER = (9, 0)


class FakeDriver:
    """As much of a driver as a compilation asks for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def compiling(capability: tuple[int, int] = HOPPER, multiprocessors: int = 132) -> Iterator[list[Any]]:
    """Every launch inside compiles; the list holds the compiled kernels, in order, each once."""
    assert not os.environ.get("TRITON_INTERPRET")
    from triton.runtime import driver, jit

    from llmbox.kernels.triton.linear import tile_config as tiles

    kernels: dict[int, Any] = {}
    cleared: set[int] = set()
    run = jit.JITFunction.run
    old = tiles.capability, tiles.multiprocessors

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert all(size < 1 << 16 for size in grid[1:]), grid
        if id(self) not in cleared:  # of what it has for another GPU, which Triton takes for the same
            self.device_caches.clear()
            cleared.add(id(self))
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels[id(kernel)] = kernel
        return kernel

    result: list[Any] = []
    driver.set_active(FakeDriver(capability))
    jit.JITFunction.run = compile_only
    tiles.capability, tiles.multiprocessors = lambda _device: capability, lambda _device: multiprocessors
    try:
        yield result
    finally:
        jit.JITFunction.run = run
        tiles.capability, tiles.multiprocessors = old
        driver._active = None
        result += kernels.values()


def resources(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes that it keeps in memory for want of more."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found, told
    return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop in the machine code: what a turn costs a warp."""

    instructions: int
    has_products: bool
    """Whether tensor cores work in it."""


def loops(kernel: Any) -> list[Loop]:
    """Find the loops in the machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", told, re.MULTILINE)
    places = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    found = []
    for number, (_, instruction) in enumerate(lines):
        jump = re.search(r"\bBRA\b.*0x([0-9a-f]+)", instruction)
        start = places.get(int(jump[1], 16), number) if jump else number
        if start < number:
            inside = " ".join(text for _, text in lines[start : number + 1])
            found.append(Loop(number - start + 1, re.search(r"\b[HIQ]G?MMA\b", inside) is not None))
    return found


def constants(kernel: Any) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel, by name."""
    names = kernel.src.fn.arg_names
    return {names[place[0]]: value for place, value in kernel.src.constants.items()}


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)
