"""Readings of the host, and of NVIDIA GPUs through NVML (`pynvml`, the module of nvidia-ml-py).

NVML blocks: it is only called through `TimedReader`. A device may refuse any single value (N/A) or be lost
while others work, and the driver may be missing or fail. Each of these is reported in the reading; none is an
exception.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from threading import get_ident
from typing import Any, Final

import psutil
from msgspec.structs import replace

from llmbox.engine.hardware.machine import read_memory

from .snapshot import NA, GpuLink, GpuProcess, GpuReading, Gpus, Host, Number, OwnProcess

_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}
# Not listed: idle (0x01), chosen application clocks (0x02) and display clocks (0x100) are harmless.


def throttle_reasons(bits: Number) -> tuple[str, ...]:
    """Names of the reasons in NVML's bit mask that reduce the clocks."""
    if bits is NA:
        return ()
    return tuple(text for bit, text in _REASONS.items() if int(bits) & bit)


RETRY_S: Final = 60.0
"""Seconds between two tries to reach a driver that failed."""

_ABSENT = ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
_REFUSED = (AttributeError, TypeError, ValueError, KeyError)
"""Errors that pynvml raises beside NVMLError when library and module have different versions."""
_LINK_KINDS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_LANES_UNKNOWN = 0


class GpuReader:
    """GPU reader. Call `read` from one thread. Keeps the last NVLink counters, to compute rates."""

    def __init__(self, nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._clock = clock
        self._handles: list[Any] = []
        self._links: tuple[GpuLink, ...] = ()
        self._up = False
        self._problem = ""
        self._next_try = 0.0
        self._nvlink: dict[int, tuple[float, float, float]] = {}

    def read(self, our_pids: frozenset[int]) -> Gpus:
        """Read all devices. `our_pids`: engine processes that should be on a GPU."""
        if not self._up and not self._begin():
            return Gpus(problem=self._problem)
        devices = tuple(self._device(index, handle, our_pids) for index, handle in enumerate(self._handles))
        if our_pids and not any(process.ours for device in devices for process in device.processes):
            # In some containers the driver hides processes: then our share is unknown rather than zero.
            devices = tuple(map(_without_owners, devices))
        if any(device.problem for device in devices):
            self._end()  # a device that comes back is only seen after a new initialization
        return Gpus(devices=devices, links=self._links)

    def _begin(self) -> bool:
        now = self._clock()
        if now < self._next_try:
            return False
        self._next_try = now + RETRY_S
        try:
            self._nvml = self._nvml or import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except Exception as error:  # noqa: BLE001 - NVML fails in many ways; serving goes on in all of them
            # A box without NVIDIA hardware has no problem to report.
            absent = type(error).__name__ in _ABSENT
            self._problem = "" if absent else f"the NVIDIA driver does not answer: {error}"
            return False
        self._up, self._problem = True, ""
        self._links = self._topology()
        return True

    def _end(self) -> None:
        self._up = False
        self._problem = "a GPU was lost; looking for it again"
        self._next_try = self._clock() + RETRY_S
        self._try(self._nvml.nvmlShutdown)

    # ------------------------------------------------------------------ one device

    def _device(self, index: int, handle: Any, our_pids: frozenset[int]) -> GpuReading:
        nvml = self._nvml
        try:
            name = _text(nvml.nvmlDeviceGetName(handle))
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            if type(error).__name__ == "NVMLError_NotSupported":
                return GpuReading(index=index, name="NVIDIA device")
            return GpuReading(index=index, name=f"GPU {index}", problem=str(error))
        processes = self._processes(handle, our_pids)
        ours, others = _split(memory, processes)
        traffic_in, traffic_out = self._nvlink_rates(index, handle)
        return GpuReading(
            index=index,
            name=name,
            uuid=_text(self._try(nvml.nvmlDeviceGetUUID, handle, nothing="")),
            utilisation=self._share(handle),
            memory_total=float(memory.total),
            memory_ours=ours,
            memory_others=others,
            memory_free=float(memory.free),
            bandwidth=self._bandwidth(handle),
            temperature=self._number(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power=self._number(nvml.nvmlDeviceGetPowerUsage, handle, scale=1e-3),
            power_cap=self._number(nvml.nvmlDeviceGetEnforcedPowerLimit, handle, scale=1e-3),
            clock_sm=self._number(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            clock_memory=self._number(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            pcie=self._pcie_link(handle),
            pcie_in=self._pcie(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
            pcie_out=self._pcie(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
            nvlink_in=traffic_in,
            nvlink_out=traffic_out,
            throttle=throttle_reasons(self._number(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)),
            processes=processes,
        )

    def _processes(self, handle: Any, our_pids: frozenset[int]) -> tuple[GpuProcess, ...]:
        found = self._try(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle, nothing=[])
        return tuple(
            GpuProcess(
                pid=int(process.pid),
                memory=NA if process.usedGpuMemory is None else float(process.usedGpuMemory),
                ours=int(process.pid) in our_pids,
            )
            for process in found
        )

    def _share(self, handle: Any) -> Number:
        rates = self._try(self._nvml.nvmlDeviceGetUtilizationRates, handle)
        return NA if rates is NA else float(rates.gpu) / 100

    def _bandwidth(self, handle: Any) -> Number:
        bits = self._number(self._nvml.nvmlDeviceGetMemoryBusWidth, handle)
        clock = self._number(self._nvml.nvmlDeviceGetMaxClockInfo, handle, self._nvml.NVML_CLOCK_MEM)
        if bits is NA or clock is NA:
            return NA
        return 2.0 * clock * 1e6 * bits / 8  # two transfers per clock, as NVML counts clocks

    def _pcie(self, handle: Any, counter: int) -> Number:
        return self._number(self._nvml.nvmlDeviceGetPcieThroughput, handle, counter, scale=1000.0)

    def _pcie_link(self, handle: Any) -> str:
        generation = self._number(self._nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
        width = self._number(self._nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
        if generation is NA or width is NA or width == _LANES_UNKNOWN:
            return "n/a"
        return f"gen{generation:.0f} x{width:.0f}"

    def _nvlink_rates(self, index: int, handle: Any) -> tuple[Number, Number]:
        """Rates from counters in KiB over all links. NA at the first reading, which has no previous one."""
        nvml = self._nvml
        fields = [nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX]
        values = self._try(nvml.nvmlDeviceGetFieldValues, handle, fields)
        if values is NA or any(value.nvmlReturn != 0 for value in values):
            return NA, NA
        now, received, sent = self._clock(), float(values[0].value.ullVal), float(values[1].value.ullVal)
        before = self._nvlink.get(index)
        self._nvlink[index] = now, received, sent
        if before is None or now <= before[0] or received < before[1] or sent < before[2]:
            return NA, NA
        seconds = now - before[0]
        return (received - before[1]) * 1024 / seconds, (sent - before[2]) * 1024 / seconds

    # ------------------------------------------------------------------ topology

    def _topology(self) -> tuple[GpuLink, ...]:
        return tuple(
            GpuLink(first=first, second=second, kind=self._link(first, second))
            for first, second in combinations(range(len(self._handles)), 2)
        )

    def _link(self, first: int, second: int) -> str:
        direct = self._direct_links(first, second)
        if direct:
            return f"NV{direct}"
        common = self._number(
            self._nvml.nvmlDeviceGetTopologyCommonAncestor, self._handles[first], self._handles[second]
        )
        return "n/a" if common is NA else _LINK_KINDS.get(int(common), "n/a")

    def _direct_links(self, first: int, second: int) -> int:
        nvml, other = self._nvml, self._try(self._nvml.nvmlDeviceGetPciInfo, self._handles[second])
        count = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            remote = self._try(nvml.nvmlDeviceGetNvLinkRemotePciInfo, self._handles[first], link)
            if remote is NA:
                break
            count += other is not NA and remote.busId == other.busId
        return count

    # ------------------------------------------------------------------ values that may be refused

    def _number(self, call: Callable[..., Any], *arguments: Any, scale: float = 1.0) -> Number:
        value = self._try(call, *arguments)
        return NA if value is NA else float(value) * scale

    def _try(self, call: Callable[..., Any], *arguments: Any, nothing: Any = NA) -> Any:
        try:
            return call(*arguments)
        except (self._nvml.NVMLError, *_REFUSED):
            return nothing


def _split(memory: Any, processes: Sequence[GpuProcess]) -> tuple[Number, Number]:
    """Return the memory of our processes, and that of others."""
    ours = 0.0
    for process in processes:
        if process.ours:
            if process.memory is NA:
                return NA, NA
            ours += process.memory
    return ours, max(0.0, float(memory.used) - ours)


def _without_owners(gpu: GpuReading) -> GpuReading:
    return replace(gpu, memory_ours=NA, memory_others=NA)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


class HostReader:
    """Host reader. Call `read` from one thread: CPU shares are measured between two calls."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._processes: dict[int, psutil.Process] = {}
        self._cores = psutil.cpu_count() or 1
        self._thread: int | None = None

    def read(self, pids: Mapping[int, str]) -> Host:
        """Read the machine. `pids`: our processes and their roles."""
        self._processes = {pid: process for pid, process in self._processes.items() if pid in pids}
        memory = read_memory()
        disk = psutil.disk_usage(str(self._disk))
        return Host(
            cpu=self._busy(),
            cores=self._cores,
            memory_total=float(memory.total),
            memory_available=float(memory.available),
            disk_total=float(disk.total),
            disk_free=float(disk.free),
            processes=tuple(
                found for pid, role in pids.items() if (found := self._process(pid, role)) is not None
            ),
        )

    def _busy(self) -> Number:
        """CPU share since the last call. psutil keeps its reference per thread, so a thread's first call has
        none.
        """
        share = psutil.cpu_percent(None) / 100
        first, self._thread = self._thread != get_ident(), get_ident()
        return NA if first else share

    def _process(self, pid: int, role: str) -> OwnProcess | None:
        try:
            process = self._processes.get(pid)
            first = process is None
            if process is None:
                process = self._processes[pid] = psutil.Process(pid)
            with process.oneshot():
                share = process.cpu_percent(None) / 100
                memory = float(process.memory_info().rss)
        except psutil.Error:
            self._processes.pop(pid, None)
            return None
        return OwnProcess(pid=pid, role=role, memory=memory, cpu=NA if first else share)
