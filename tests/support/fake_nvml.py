"""NVML without a driver: pynvml's own constants and errors, devices of ours, faults on demand."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


@dataclass
class FakeGpu:
    name: str = "NVIDIA H200"
    total: int = 140 * GIB
    used: int = 30 * GIB
    processes: dict[int, int | None] = field(default_factory=dict)
    lost: bool = False
    nvlink_bytes: int = 0
    throttle: int = 0


@dataclass
class FakeNvml:
    """`not_available`: calls that every device refuses; `hang`: set to block every read of a device."""

    gpus: list[FakeGpu] = field(default_factory=lambda: [FakeGpu()])
    init_error: str | None = None
    not_available: frozenset[str] = frozenset()
    hang: threading.Event | None = None
    """Reads wait until it is set."""
    inits: int = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvml") and name[4:5].isupper():
            return lambda *arguments: self._call(name, *arguments)
        return getattr(pynvml, name)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        self.inits += 1
        if self.init_error is not None:
            raise getattr(pynvml, self.init_error)

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        return self.gpus[index]

    def _call(self, name: str, gpu: FakeGpu, *arguments: Any) -> Any:
        if self.hang is not None:
            self.hang.wait(600)
        if gpu.lost:
            raise pynvml.NVMLError_GpuIsLost
        if name in self.not_available:
            raise pynvml.NVMLError_NotSupported
        return self._answers(name, gpu, arguments)

    def _answers(self, name: str, gpu: FakeGpu, arguments: tuple[Any, ...]) -> Any:
        match name:
            case "nvmlDeviceGetName":
                return gpu.name
            case "nvmlDeviceGetUUID":
                return "GPU-1234"
            case "nvmlDeviceGetMemoryInfo":
                return SimpleNamespace(total=gpu.total, used=gpu.used, free=gpu.total - gpu.used)
            case "nvmlDeviceGetUtilizationRates":
                return SimpleNamespace(gpu=42, memory=7)
            case "nvmlDeviceGetComputeRunningProcesses":
                return [
                    SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in gpu.processes.items()
                ]
            case "nvmlDeviceGetFieldValues":
                return [
                    SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=gpu.nvlink_bytes // 1024))
                ] * 2
            case "nvmlDeviceGetPciInfo":
                return SimpleNamespace(busId=id(gpu))
            case "nvmlDeviceGetNvLinkRemotePciInfo":
                if arguments[0] >= 4 or len(self.gpus) < 2:
                    raise pynvml.NVMLError_NotSupported
                return SimpleNamespace(busId=id(self.gpus[1]))
            case "nvmlDeviceGetMigMode":
                raise pynvml.NVMLError_NotSupported
            case "nvmlDeviceGetCurrentClocksThrottleReasons":
                return gpu.throttle
        return NUMBERS[name]


NUMBERS = {
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetPowerUsage": 412_000,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetMaxClockInfo": 3201,
    "nvmlDeviceGetMemoryBusWidth": 6144,
    "nvmlDeviceGetPcieThroughput": 1500,
    "nvmlDeviceGetCurrPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetTopologyCommonAncestor": 50,
}
