"""Experts of a mixture that the CPU computes beside a GPU: `Ops.host_experts`.

Rows and logits of the router are copied to pinned memory, the C++ kernels compute the experts there, and
their sum is copied back. Its bits are those of the C++ kernels for these rows, whatever else is in the step.

The host waits for the rows of each layer while it launches a step: a step is done in its last layer with
experts when its launch returns, and cannot be recorded as a CUDA graph.

T rows of the step, E hidden, X experts.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmbox.kernels.cpu.build import NativeUnavailable
from llmbox.kernels.dispatch import select_host
from llmbox.kernels.lora import ExpertAdapters
from llmbox.kernels.op_types import ExpertOwners, Mixture
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import Quant

from ..errors import DeviceError
from .device import Device, DeviceEvent


def with_host_experts(ops: Ops, device: Device, threads: int, quant: Quant | None) -> Ops:
    """Return a GPU's operations with experts on the CPU, on so many threads and with weights of this format.
    Raises DeviceError.
    """
    try:
        host = select_host(threads, quant)
    except NativeUnavailable as error:
        raise DeviceError(
            f"experts in main memory need the C++ kernels: {error}; load with --cpu-experts off"
        ) from None
    experts = HostExperts(host, device)
    return replace(
        ops,
        name=f"{ops.name}; experts: {host.name}",
        experts=experts.experts,
        expert_results=None,
        combine_experts=None,
        pack_experts=None,
        host_experts=host,
        send_expert_inputs=experts.send,
    )


@dataclass(frozen=True, slots=True)
class SentRows:
    """Rows and logits on their way to the host."""

    x_TE: Tensor
    logits_TX: Tensor
    arrival: DeviceEvent
    kept: tuple[Tensor, ...]
    """Memory of the device that is read until the arrival."""


class HostExperts:
    """`Ops.experts` of one engine. Buffers serve all layers: a layer waits for those before it."""

    def __init__(self, host: Ops, device: Device) -> None:
        self._host, self._device = host, device
        self._stream = device.copy_stream()
        self._buffers: dict[str, Tensor] = {}
        self._sent: SentRows | None = None
        self._alone: dict[int, Mixture] = {}
        """Mixtures whose results are added up apart, by the id of those that layers have."""

    def send(self, x_TE: Tensor, logits_TX: Tensor) -> None:
        """Begin to copy what `experts` reads next, beside what the device is given from now on."""
        wide_TX = logits_TX.float()
        x_host, logits_host = self._buffer("rows", x_TE), self._buffer("logits", wide_TX)
        self._stream.follow_steps()
        self._stream.copy(x_TE, x_host)
        self._stream.copy(wide_TX, logits_host)
        self._sent = SentRows(x_host, logits_host, self._stream.record(), (x_TE, wide_TX))

    def experts(
        self,
        mixture: Mixture,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None = None,
        gate_T1: Tensor | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Implement `Ops.experts`. Rows that were sent are `x_TE` and `logits_TX`."""
        assert adapters is None, "refused when they are loaded"
        if self._sent is None:
            self.send(x_TE, logits_TX)
        sent, self._sent = self._sent, None
        assert sent is not None
        if shared_TE is None:
            sent.arrival.wait()
            out_TE = self._host.experts(mixture, sent.x_TE, sent.logits_TX)
        else:
            out_TE = self._add_shared(mixture, sent, shared_TE, gate_T1)
        host_TE = self._buffer("results", out_TE)
        host_TE.copy_(out_TE)
        result_TE = torch.empty_like(x_TE)
        self._device.copy(host_TE, result_TE)
        return result_TE

    def _add_shared(
        self, mixture: Mixture, sent: SentRows, shared_TE: Tensor, gate_T1: Tensor | None
    ) -> Tensor:
        """Compute the experts while the device computes the shared one, and add up as `experts` does."""
        assert self._host.expert_results is not None
        assert self._host.combine_experts is not None
        shared_host, gate_host = self._buffer("shared", shared_TE), None
        self._device.copy(shared_TE, shared_host)
        if gate_T1 is not None:
            wide_T1 = gate_T1.float()
            gate_host = self._buffer("gates", wide_T1)
            self._device.copy(wide_T1, gate_host)
        arrival = self._device.record()
        sent.arrival.wait()
        results = self._host.expert_results(self._undivided(mixture), sent.x_TE, sent.logits_TX)
        arrival.wait()
        return self._host.combine_experts(results, shared_host, gate_host)

    def _undivided(self, mixture: Mixture) -> Mixture:
        """Return the mixture with this rank as the holder of all experts."""
        found = self._alone.get(id(mixture))
        if found is None:
            owners = ExpertOwners([(0,)] * mixture.count, 0, 1)
            found = self._alone[id(mixture)] = replace(mixture, owners=owners)
        return found

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Return pinned memory in the shape of `like`, valid until it is asked for by the same name."""
        size, buffer = like.numel(), self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype:
            buffer = self._buffers[name] = self._device.host_memory(1 << (size - 1).bit_length(), like.dtype)
        return buffer[:size].view(like.shape)
