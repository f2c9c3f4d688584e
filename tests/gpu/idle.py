"""What a GPU does while an engine waits on it for requests: clocks must be free to fall."""

import time

import torch

from gpu.report import Report


def idle_clocks(report: Report) -> None:
    """With the engine loaded and nothing to do."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(this_gpu())
        time.sleep(4)
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        used = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        report.row(("idle for 4 s", f"{clock} MHz, {watts:.0f} W", f"utilisation {used} %"))
    except Exception as error:  # noqa: BLE001 - a driver may refuse any of these
        report.row(("idle for 4 s", "not available", str(error)[:80]))


def this_gpu() -> str:
    """Its UUID: the driver's numbers are others than CUDA's."""
    from llmbox.engine.device.device import cuda_machine

    return cuda_machine().gpus[torch.cuda.current_device()].uuid
