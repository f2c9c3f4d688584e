"""Memory bandwidth of this machine: reported by GPUs, probed once on a CPU and saved beside the daemon's
state.
"""

import ctypes
import logging
import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from llmbox.engine.hardware.machine import Machine

from ..engines.eviction import Place
from ..util.atomic_file import write_whole

log = logging.getLogger(__name__)

PROBE_BYTES: Final = 1 << 28
"""Read in a round: more than caches hold."""
PROBE_ROUNDS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Memory bandwidth in bytes a second, over all threads that read together."""

    best: float
    """Mean of the best quarter of the rounds."""
    typical: float
    """Median of the rounds: other programs and machines on the same host take their part."""
    probed_at: float | None = None
    """Unix seconds; None where the hardware reports its bandwidth."""
    was_busy: bool = False
    """True if other programs wanted the cores during the probe."""

    @classmethod
    def exact(cls, value: float) -> "Bandwidth":
        return cls(best=value, typical=value)


class BandwidthProbes(msgspec.Struct, kw_only=True):
    """Content of the probe file. Probes of another machine do not count."""

    cpu: str
    cores: int
    memory_gb: int
    by_threads: dict[str, Bandwidth] = {}


def device_bandwidth(
    machine: Machine, device: Place, file: Path, threads: int | None = None, *, refresh: bool = False
) -> Bandwidth | None:
    """Return the device's bandwidth; None where a GPU does not report it. A CPU is probed where `file` has no
    value yet, or to `refresh` it.
    """
    if device == "cuda":
        datasheet = machine.gpus[0].bandwidth
        return None if datasheet is None else Bandwidth.exact(datasheet)
    count = str(threads or machine.cpu.cores)
    probes = _read(file, machine)
    kept = probes.by_threads.get(count)
    if kept is not None and not refresh and (not kept.was_busy or is_busy(int(count))):
        return kept
    probed = probe(int(count))
    probes.by_threads[count] = probed
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, msgspec.json.encode(probes))
    except OSError as error:
        log.info("the memory probe is not kept: %s cannot be written (%s)", file, error.strerror)
    return probed


def probe(threads: int, size: int = PROBE_BYTES, rounds: int = PROBE_ROUNDS) -> Bandwidth:
    """Read buffers larger than caches, as decoding reads weights (about half a second)."""
    share = size // threads
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    buffers = [ctypes.create_string_buffer(share) for _ in range(threads)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, share)  # untouched pages would all be the same one of zeros
    rates = []
    for _ in range(rounds):
        readers = [threading.Thread(target=search, args=(buffer, 2, share)) for buffer in buffers]
        began = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        rates.append(share * threads / (time.perf_counter() - began))
    return Bandwidth(
        best=statistics.mean(sorted(rates)[-max(1, rounds // 4) :]),
        typical=statistics.median(rates),
        probed_at=time.time(),
        was_busy=is_busy(threads),
    )


def is_busy(threads: int) -> bool:
    """Return True if about as many processes as `threads` wanted to run in the last minute."""
    return os.getloadavg()[0] > 0.7 * threads


def _read(file: Path, machine: Machine) -> BandwidthProbes:
    here = BandwidthProbes(
        cpu=machine.cpu.model, cores=machine.cpu.cores, memory_gb=round(machine.memory.total / 1e9)
    )
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=BandwidthProbes)
    except (OSError, msgspec.MsgspecError):
        return here
    return kept if (kept.cpu, kept.cores, kept.memory_gb) == (here.cpu, here.cores, here.memory_gb) else here
