"""Compiles every kernel for GPUs that are not there and says what each takes of them: `make gpu-compile`.

Needs torch, triton and no GPU: the machine code is made by the assembler that comes with Triton. A line for
each kernel that is over a card's limits, or keeps numbers in memory for want of registers; status 1 where a
kernel does not compile or does not fit.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from multiprocessing import get_context
from typing import Any

from gpu.static_roofline import CARDS, describe_turn, issue_share, main_loop

SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that one block may have, by compute capability (CUDA C++ programming guide)."""
LOOPED = {"attention_kernel", "product_kernel", "scan_kernel", "scan_chunks_kernel"}
"""Kernels whose main loops decide their time. To disassemble one takes half a second."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One variant, as compiled. `spilled`: bytes a thread keeps in memory for want of registers."""

    target: int
    group: str
    name: str
    variant: str
    """What its main loop reads, where that is known."""
    warps: int
    shared: int
    registers: int
    spilled: int
    wgmma: bool
    """Whether it has Hopper's own tensor core instructions."""
    cubin: int
    """Bytes of machine code."""
    loop: int
    """Instructions of the main loop of a kernel in `LOOPED`; 0 for others."""
    turn_bytes: int
    """Bytes of keys, values or weights that a turn of it reads; 0 where that is not known."""

    @property
    def issue_share(self) -> float:
        return issue_share(CARDS[self.target], self.loop, self.warps, self.turn_bytes)

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED_LIMIT[self.target]


@dataclass(frozen=True, slots=True)
class Broken:
    target: int
    group: str
    error: str


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default="90,80,86,89,100,120", help="with commas (all: %(default)s)")
    parser.add_argument("--few", action="store_true", help="the variants that matter most")
    parser.add_argument("--once", action="store_true", help="every kernel in one variant or two")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--group", default="", help="only groups whose name begins so")
    parser.add_argument("--json", action="store_true", help="facts of every kernel, a line each")
    parser.add_argument("--loops", action="store_true", help="main loops against the cards' bandwidth")
    options = parser.parse_args()
    targets = [int(target) for target in options.targets.split(",")]
    if unknown := set(targets) - set(SHARED_LIMIT):
        parser.error(f"unknown target {min(unknown)}: there are {', '.join(map(str, SHARED_LIMIT))}")
    choice = "once" if options.once else "few" if options.few else "every"
    started = time.monotonic()
    kernels: list[Kernel] = []
    failed = False
    for found in compile_all(targets, options.group, choice, options.jobs):
        if isinstance(found, Broken):
            print(f"{found.target} {found.group}: {found.error}", file=sys.stderr)
            failed = True
            continue
        kernels += found
        failed |= not all(kernel.fits for kernel in found)
        for kernel in found if options.json else ():
            print(json.dumps(asdict(kernel)), flush=True)
    if not options.json:
        loop_table(kernels) if options.loops else summary(kernels)
        print(f"{len(kernels)} variants in {time.monotonic() - started:.0f} s")
    return int(failed)


def compile_all(
    targets: Sequence[int], group: str, choice: str, jobs: int
) -> Iterator[list[Kernel] | Broken]:
    """Group by group, as they are done; with one job in this process."""
    os.environ.pop("TRITON_INTERPRET", None)
    work = [
        (target, number, choice)
        for target in targets
        for number, name in enumerate(names(target, choice))
        if name.startswith(group)
    ]
    if not work:
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        if jobs == 1:
            yield from starmap(compile_group, work)
            return
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            yield from pool.map(compile_group, *zip(*work, strict=True))


def names(target: int, choice: str) -> list[str]:
    """`choice`: the function of `compiled.py` that lists the groups."""
    from gpu import compiled

    return [name for name, _ in getattr(compiled, choice)(divmod(target, 10))]


def compile_group(target: int, number: int, choice: str) -> list[Kernel] | Broken:
    """Triton knows of one target only at a time."""
    from gpu import compiled
    from support.triton_compile import compiling, resources

    capability = divmod(target, 10)
    name, work = list(getattr(compiled, choice)(capability))[number]
    try:
        with compiling(capability, CARDS[target].multiprocessors) as kernels:
            work()
    except Exception as error:  # noqa: BLE001 - compilers have many; the others still say something
        traceback.print_exc()
        return Broken(target, name, f"{type(error).__name__}: {str(error)[:300]}")
    return [facts(target, name, kernel, *resources(kernel)) for kernel in kernels]


def facts(target: int, group: str, kernel: Any, registers: int, spilled: int) -> Kernel:
    from support.triton_compile import constants, loops

    name, variant, turn_bytes, loop = kernel.metadata.name, "", 0, 0
    if name in LOOPED:
        loop = main_loop(loops(kernel))
        variant, turn_bytes = describe_turn(name, kernel.src.signature, constants(kernel))
    return Kernel(
        target=target,
        group=group,
        name=name,
        variant=variant,
        warps=kernel.metadata.num_warps,
        shared=kernel.metadata.shared,
        registers=registers,
        spilled=spilled,
        wgmma="wgmma.mma_async" in kernel.asm["ptx"],
        cubin=len(kernel.asm["cubin"]),
        loop=loop,
        turn_bytes=turn_bytes,
    )


def summary(kernels: Iterable[Kernel]) -> None:
    """The most of each kernel, and every variant that spills or does not fit."""
    of: dict[tuple[int, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        of[kernel.target, kernel.name].append(kernel)
    print("| target | kernel | variants | registers | shared, KB | spilled, bytes a thread |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (target, name), variants in of.items():
        cells = (
            target,
            name,
            len(variants),
            max(one.registers for one in variants),
            f"{max(one.shared for one in variants) / 1024:.0f}",
            max(one.spilled for one in variants),
        )
        print("| " + " | ".join(map(str, cells)) + " |")
    for one in (each for variants in of.values() for each in variants if each.spilled or not each.fits):
        what = f"spills {one.spilled} bytes" if one.fits else f"wants {one.shared} bytes of shared memory"
        print(f"{one.target} {one.name} ({one.group}, {one.warps} warps, {one.registers} registers): {what}")


def loop_table(kernels: Iterable[Kernel]) -> None:
    """Print the main loops whose bytes are known: above 100 % issuing takes longer than reading."""
    print("| card | kernel | variant | warps | registers | loop | bytes a turn | issue share |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in dict.fromkeys(replace(kernel, group="") for kernel in kernels if kernel.turn_bytes):
        cells = (one.name, one.variant, one.warps, one.registers, one.loop, one.turn_bytes)
        share = f"{one.issue_share:.0%}"
        print("| " + " | ".join(map(str, (CARDS[one.target].name, *cells, share))) + " |")


if __name__ == "__main__":
    sys.exit(main())
