"""Runs steps on a device that works on its own: a launch queues everything and waits for nothing.

    launch   what changed -> device | forward pass, as a graph where it decodes | draw | copy to the host
    collect  wait for that copy

What a step needs of the one before (last tokens, KV) never leaves the device.
T rows of the step, W rows whose logits are wanted, S of them that sample, R rows of `Rows`, E hidden.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbox.kernels.ops import KVCache
from llmbox.kernels.ragged import Ragged

from ..layers.decoder import Decoder
from ..layers.forward import Forward
from ..layers.rotary import Rotary
from ..messages import TokenLogprobs
from ..request import Request
from ..runner import Picker, prompt_logprobs
from ..step import ScheduledRequest, StepPlan, StepResult
from ..step_batch import begun_blocks
from .device import Device, Event
from .graphs import DecodeGraphs, GraphCapture
from .inputs import decode_inputs, mixed_inputs
from .rows import Rows
from .sampler import DeviceSampler, Drawing
from .upload import Uploader


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    block_size: int
    num_blocks: int
    """Of the pool; the cache has one more, `num_blocks` itself, for rows that fill up."""
    context: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Launched:
    event: Event
    drawing: Drawing | None
    numbers_SC: Tensor | None
    """On the host, of use once the event has been."""
    prompt_logprobs: dict[str, list[TokenLogprobs]]


class DeviceRunner:
    depth = 1

    def __init__(
        self,
        model: Decoder,
        rotary: Rotary,
        cache: KVCache,
        sampler: Picker,
        device: Device,
        sizes: DeviceSizes,
        capture: GraphCapture | None = None,
        graphs_bytes: int = 0,
    ) -> None:
        """`sampler` serves log-probabilities of prompts only. `capture` None: no graphs."""
        self._model, self._rotary, self._cache, self._sampler = model, rotary, cache, sampler
        assert model.norm_E is not None, "of one rank"
        self._ops, self._device, self._sizes = model.ops, device, sizes
        self._windows = set(model.config.windows)
        width = -(-sizes.context // sizes.block_size)
        vocab_size, where = model.config.vocab_size, device.torch_device
        self._rows = Rows(sizes.max_running, width, sizes.num_blocks, vocab_size, where)
        self._draw = DeviceSampler(self._ops, self._rows, vocab_size)
        self._uploader = Uploader(device, self.depth + 2)
        self._spare = torch.tensor([[sizes.max_running], [0]], device=where)
        self._decoding_2R = self._spare.repeat(1, sizes.max_running)
        """Row and length of each sequence of a decoding step: where graphs find them."""
        self._contexts = [1] * sizes.max_running
        hidden = sizes.max_running, model.config.hidden_size
        self._hidden_RE = torch.empty(hidden, dtype=model.norm_E.dtype, device=where)
        self._ops.clear_blocks(cache, [sizes.num_blocks])
        self.graphs = None
        if capture is not None:
            self.graphs = DecodeGraphs(capture, self._decode, sizes.max_running, graphs_bytes)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        self._uploader.begin_step()
        self._ops.copy_blocks(self._cache, plan.copies)
        self._ops.clear_blocks(self._cache, begun_blocks(plan.rows, self._sizes.block_size))
        numbers = [self._rows.note(row) for row in plan.rows]
        self._rows.flush(self._uploader)
        if all(row.num_tokens == 1 and row.samples for row in plan.rows):
            return self._launch_decoding(plan.rows, numbers)
        return self._launch_mixed(plan.rows, numbers)

    def collect(self, handle: Launched) -> StepResult:
        handle.event.wait()
        if handle.drawing is None or handle.numbers_SC is None:
            return StepResult(prompt_logprobs=handle.prompt_logprobs)
        tokens, failed = handle.drawing.read(handle.numbers_SC.tolist())
        return StepResult(tokens, handle.prompt_logprobs, failed)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture one more graph; False if there is none left. For moments when nothing runs."""
        if self.graphs is None or (size := self.graphs.next_size) is None:
            return False
        self._capture(self.graphs, size)
        return True

    def _launch_decoding(self, planned: Sequence[ScheduledRequest], numbers: Sequence[int]) -> Launched:
        count = len(planned)
        size = self._graph_size(count)
        ends = [row.end for row in planned]
        fill = (size or count) - count
        filled = [self._rows.spare] * fill
        (both,) = self._uploader.upload(array("q", [*numbers, *filled, *ends, *[0] * fill]))
        self._decoding_2R[:, : size or count].copy_(both.view(2, -1))
        self._contexts[: size or count] = [*ends, *[1] * fill]
        if size is None or self.graphs is None:
            self._decode(count)
        else:
            self.graphs.replay(size)
        row_S, end_S = self._decoding_2R[:, :count]
        logits_SV = self._model.logits(self._hidden_RE[:count])
        return self._finish(logits_SV, [row.request for row in planned], row_S, end_S, {})

    def _launch_mixed(self, planned: Sequence[ScheduledRequest], numbers: Sequence[int]) -> Launched:
        step = mixed_inputs(planned, numbers, self._rows, self._uploader, self._sizes.block_size)
        hidden_WE = self._model.hidden(self._forward(step.ids_T, step.ragged), step.wanted_W)
        requests = [row.request for row in planned if row.samples]
        told = prompt_logprobs(self._model, self._sampler, hidden_WE[len(requests) :], step.prompts)
        if not requests:
            return Launched(self._device.record(), None, None, told)
        logits_SV = self._model.logits(hidden_WE[: len(requests)])
        return self._finish(logits_SV, requests, step.row_S, step.position_S, told)

    def _finish(
        self,
        logits_SV: Tensor,
        requests: list[Request],
        row_S: Tensor,
        position_S: Tensor,
        told: dict[str, list[TokenLogprobs]],
    ) -> Launched:
        drawing = self._draw.draw(logits_SV, requests, row_S, position_S)
        numbers_SC = drawing.numbers_SC
        host = self._device.host_memory(numbers_SC.numel(), torch.float64).view(numbers_SC.shape)
        self._device.copy(numbers_SC, host)
        return Launched(self._device.record(), drawing, host, told)

    def _decode(self, size: int) -> None:
        """One row each of the first `size` sequences, hidden states to `_hidden_RE`: what graphs capture."""
        row_N, length_N = self._decoding_2R[:, :size]
        ids_N, ragged = decode_inputs(
            self._ops, self._rows, row_N, length_N, self._contexts[:size], self._sizes.block_size
        )
        self._hidden_RE[:size].copy_(self._model.hidden(self._forward(ids_N, ragged), None))

    def _forward(self, ids_T: Tensor, ragged: Ragged) -> Forward:
        cos_TD, sin_TD = self._rotary.rows(ragged.positions_T)
        plans = {w: self._ops.plan_attention(ragged, self._cache, w) for w in self._windows}
        return Forward(ids_T, cos_TD, sin_TD, self._cache, plans)

    def _graph_size(self, count: int) -> int | None:
        if self.graphs is None:
            return None
        if (urgent := self.graphs.urgent_size) is not None:
            self._capture(self.graphs, urgent)
        return self.graphs.size_for(count)

    def _capture(self, graphs: DecodeGraphs, size: int) -> None:
        """The inputs still name the rows of the last step: a warm-up would write their KV once more."""
        self._decoding_2R.copy_(self._spare.expand_as(self._decoding_2R))
        self._contexts = [1] * len(self._contexts)
        graphs.capture(size)
