"""Asynchronous model runner for GPUs: `launch` queues a step without waiting, `collect` waits for its
results.

    launch   state changes -> device | forward pass, as a CUDA graph when decoding | sample | copy to the host
    collect  wait for that copy

Data that a step needs from the previous one (last tokens, KV) never leaves the device. All ranks launch the
same steps in the same order and of the same sizes, so that their collectives match.

T rows of the step, W rows whose logits are wanted, S of them that sample, R rows of `DeviceRequestState`, E
hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout
from llmbox.kernels.ops import KVCache

from ..core.request import Request
from ..core.step import ProfiledRunner, ScheduledRequest, StepPlan, StepResult, ceil_div
from ..device.device import Device, Uploader, to_host
from ..model.decoder import Decoder
from ..model.draft_heads import DraftHead
from ..model.forward_context import ForwardContext
from ..model.rotary import Rotary
from ..sampling.device_sampler import DeviceSampler, DeviceSamplerOutput, draws_plainly
from ..sampling.device_state import DeviceRequestState, SampledTokenFeedback
from .block_memory import DeviceBlockMemory, ModelCaches
from .cuda_graphs import CudaCapture, DecodeGraphs, GraphSize
from .draft_model import ModelProposer
from .draft_verification import is_decoding
from .gpu_inputs import DeviceAdapters, DeviceInputs, DeviceSizes, MixedStep
from .image_rows import EncodedImages
from .input_batch import begun_blocks, sliding_table
from .prompt_results import LaunchedStep, StepExtras, queue_extras

if TYPE_CHECKING:
    from .draft_head import HeadProposer


class GPUModelRunner:
    """Runner of one rank. Owns model, KV cache, request state on the device, and CUDA graphs."""

    lag = 0
    """Slots by which keys lie before their tokens."""
    unread = 0
    """Launches beside those in flight whose results nobody reads, so that they may still be under way."""

    def __init__(
        self,
        model: Decoder | DraftHead,
        rotary: Rotary,
        caches: ModelCaches,
        device: Device,
        sizes: DeviceSizes,
        capture: CudaCapture | None = None,
        graphs_bytes: int = 0,
        *,
        images: EncodedImages | None = None,
    ) -> None:
        """`capture`: None for no CUDA graphs. `graphs_bytes`: memory that graphs may take. `images`: of a
        model with a vision tower.
        """
        self.images = images
        self._has_mrope = images is not None and bool(images.config.mrope_section)
        self._model, self._rotary, self.caches = model, rotary, caches
        self._rank = model.rank
        self._ops, self._device, self._sizes = model.ops, device, sizes
        self._windows = set(model.config.windows)
        width = -(-sizes.context // sizes.block_size)
        vocab_size, where = sizes.vocab_size or model.config.vocab_size, device.torch_device
        spare = sizes.window_blocks or None
        self._rows = DeviceRequestState(sizes.max_running, width, sizes.num_blocks, vocab_size, where, spare)
        self._sampler = DeviceSampler(self._ops, self._rows, vocab_size, self._rank)
        self.depth = self.stages = self._rank.layout.pp
        """Steps in flight: one per stage, and one more that is launched while they run."""
        if self._ops.host_experts is not None:
            self.depth = 0  # a launch takes as long as its step, and would keep back the results of another
        self._feedback = SampledTokenFeedback(self._rank, self._rows, self.depth)
        self._uploader = Uploader(device, self.depth + 2 + self.unread)
        self._inputs = DeviceInputs(
            self._ops,
            self._rows,
            self._uploader,
            sizes.block_size,
            with_states=caches.states is not None,
            with_lengths=rotary.short_context > 0,
            lag=self.lag,
        )
        spare_row, _ = self._inputs.decoding_numbers([], [], 1)
        self._spare_4 = torch.tensor(spare_row, device=where).view(-1, 1)
        self._decoding = self._spare_4.repeat(1, sizes.rows).flatten()
        """Memory of `_decoding_of`, an input of the graphs."""
        self._numbers_R3 = torch.empty(sizes.rows, 3, dtype=torch.float64, device=where)
        """Output of graphs that draw."""
        self._contexts = [1] * sizes.rows
        self._hidden_RE = torch.empty(sizes.rows, model.config.hidden_size, dtype=model.dtype, device=where)
        caches.clear([sizes.num_blocks], lambda: [sizes.window_blocks])
        self._adapters = DeviceAdapters(model, sizes.rows, self._uploader, where)
        self.proposers: list[ModelProposer] = []
        """Draft model or head beside this one, on the same stream."""
        self._follower: HeadProposer | None = None
        self._tapped_RF: Tensor | None = None
        self._features_TF: Tensor | None = None
        self.graphs: DecodeGraphs | None = None
        self.adapted_graphs: DecodeGraphs | None = None
        """Graphs of steps in which rows have an adapter; None until there is one."""
        if capture is not None:
            agree = self._rank.communicator.all_agree if self._rank.layout.ranks > 1 else None
            most = max(ceil_div(sizes.max_running, self.stages), sizes.draft_rows)
            # Ranks exchange rows of logits by operations that a graph may not hold.
            draw = self._draw if agree is None and self._ops.sample is not None else None
            self._make_graphs = partial(
                DecodeGraphs, capture, most=most, budget_bytes=graphs_bytes, draw=draw, agree=agree
            )
            self.graphs = self._make_graphs(self._decode)

    def attach(self, proposer: "HeadProposer", cache: KVCache, taps: Sequence[int] = ()) -> None:
        """Show the hidden states of each later step to a draft head. `cache`: of the head, if it has one.
        `taps`: layers whose inputs it reads in place of the last hidden states.
        """
        self._follower = proposer
        if cache is not None:
            self.caches.add(cache)
        if taps:
            assert isinstance(self._model, Decoder)
            self._model.tap(taps)
            rows, hidden = self._hidden_RE.shape
            self._tapped_RF = self._hidden_RE.new_empty(rows, len(taps) * hidden)

    def block_memory(self) -> DeviceBlockMemory:
        """Return access to the bytes of its KV blocks and recurrent states."""
        return self.caches.memory(self._device)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step on the device, and capture its graph if that is urgent."""
        launched = self.launch_sized(plan, self.size_for(plan))
        if (urgent := self.urgent_capture) is not None:
            self.capture(urgent)
        return launched

    @torch.inference_mode()
    def launch_sized(self, plan: StepPlan, size: int) -> LaunchedStep:
        """Queue a step padded to `size`: the result of `size_for` on the rank that decides for all."""
        self._uploader.begin_step()
        if plan.adapter_loads:
            serves = self._adapters.load(plan.adapter_loads)
            if not serves and self.graphs is not None:
                self.adapted_graphs = self._make_graphs(partial(self._decode, is_adapted=True))
        self._prepare_blocks(plan)
        numbers = [self._rows.stage_update(row) for row in plan.rows]
        self._feedback.wait_for_rows(numbers)
        self._rows.flush(self._uploader)
        if self._is_decoding(plan):
            launched = self._launch_decoding(plan, numbers, size or plan.num_tokens)
        else:
            launched = self._launch_mixed(plan, numbers)
        features_TF, self._features_TF = self._features_TF, None
        failed = self._adapters.failures(plan.rows)
        return replace(launched, rows=plan.rows, features_TF=features_TF, failed=failed)

    def _prepare_blocks(self, plan: StepPlan) -> None:
        rows, size = plan.rows, self._sizes.block_size
        self.caches.copy(plan)
        self.caches.clear(begun_blocks(rows, size), lambda: begun_blocks(rows, size, sliding_table))

    def size_for(self, plan: StepPlan) -> int:
        """Return the graph size to pad the step to; 0: run eagerly."""
        graphs = self._graphs_of(plan.rows)
        # Graphs may not serve an adapter that is still to be loaded.
        if graphs is None or plan.adapter_loads or not self._is_decoding(plan):
            return 0
        return graphs.size_for(plan.num_tokens) or 0

    def _graphs_of(self, rows: Sequence[ScheduledRequest]) -> DecodeGraphs | None:
        return self.adapted_graphs if self._adapters.are_of(rows) else self.graphs

    def collect(self, handle: LaunchedStep) -> StepResult:
        """Wait for a launched step and return its results."""
        result = handle.read()
        if handle.features_TF is not None and self._follower is not None:
            self._follower.observe(handle.rows, handle.features_TF, result)
        return result

    @property
    def urgent_capture(self) -> GraphSize | None:
        """Graph of the step that has just run, if it is worth capturing while requests run."""
        size = self._capture_of(lambda graphs: graphs.urgent_size)
        return None if size is None else size._replace(is_warm=True)

    @property
    def next_capture(self) -> GraphSize | None:
        """Next graph to capture while the engine is idle; None if none is left."""
        return self._capture_of(lambda graphs: graphs.next_size)

    @property
    def early_capture(self) -> GraphSize | None:
        """Graph to capture while the model loads; None if the next one can wait."""
        return self._capture_of(lambda graphs: graphs.early_size)

    def _capture_of(self, size_of: Callable[[DecodeGraphs], int | None]) -> GraphSize | None:
        for graphs, is_adapted in ((self.graphs, False), (self.adapted_graphs, True)):
            if graphs is not None and (rows := size_of(graphs)) is not None:
                return GraphSize(rows, is_adapted)
        return None

    def prepare(self) -> bool:
        """Capture one more graph, also of a draft model; False if none was left. Called while the engine is
        idle.
        """
        size = self.next_capture
        if size is not None:
            self.capture(size)
        return size is not None or any(proposer.prepare() for proposer in self.proposers)

    def take_back(self, requests: Sequence[Request]) -> None:
        """Undo the sampling of tokens for these requests: they were drafts."""
        self._sampler.take_back(requests)

    @torch.inference_mode()
    def capture(self, size: GraphSize) -> None:
        graphs = self.adapted_graphs if size.is_adapted else self.graphs
        assert graphs is not None
        # The inputs still name the rows of the last step: the warm-up would write their KV once more.
        self._decoding_of(size.rows).copy_(self._spare_4.expand(-1, size.rows))
        self._contexts = [1] * len(self._contexts)
        self._adapters.tiles.fill_(-1)
        graphs.capture(size.rows, is_warm=size.is_warm)

    def _launch_decoding(self, plan: StepPlan, numbers: Sequence[int], size: int) -> LaunchedStep:
        self._run_decoding(plan, numbers, size)
        count = plan.num_tokens
        if self._follower is not None:
            features_RF = self._hidden_RE if self._tapped_RF is None else self._tapped_RF
            self._features_TF = features_RF[:count].clone()  # the next step writes there
        if (drawn := self._draw_by_graph(plan, size)) is not None:
            return drawn
        row_S, end_S = self._decoding_of(size)[:2, :count]
        return self._finish(self._hidden_RE[:count], plan.rows, numbers, row_S, end_S)

    def _run_decoding(self, plan: StepPlan, numbers: Sequence[int], size: int) -> None:
        """Compute a decoding step; without a graph of this size the padded rows run eagerly."""
        inputs, self._contexts[:size] = self._inputs.decoding_numbers(plan.rows, numbers, size)
        self._uploader.upload_to(self._decoding[: len(inputs)], inputs)
        is_adapted = self._adapters.are_of(plan.rows)
        if is_adapted:
            self._adapters.upload(plan.rows, size)
        graphs = self._graphs_of(plan.rows)
        if graphs is not None and graphs.has(size):
            graphs.replay(size)
        else:
            self._decode(size, is_adapted=is_adapted)

    def _launch_mixed(self, plan: StepPlan, numbers: Sequence[int]) -> LaunchedStep:
        planned = plan.rows
        step = self._inputs.mixed(planned, numbers, with_adapters=self._adapters.are_of(planned))
        if self.images is not None and any(row.request.images for row in planned):
            forward = self._forward_with_images(step, plan, self.images)
        else:
            forward = self._forward(step.ids_T, step.ragged, None, step.is_long)
        if self._follower is None:
            hidden_WE = self._hidden(forward, step.wanted_W)
        else:
            hidden_TE = self._hidden(forward, None)
            self._features_TF = hidden_TE if self._tapped_RF is None else self._take_tapped()
            hidden_WE = hidden_TE.index_select(0, step.wanted_W)
        count = len(step.row_S)
        of_logits = self._adapters.of_logits
        extras = queue_extras(step, hidden_WE[count:], self._model, self._device, of_logits)
        if not count:
            return LaunchedStep(self._device.record(), None, None, extras)
        return self._finish(hidden_WE[:count], planned, numbers, step.row_S, step.position_S, extras)

    def _finish(
        self,
        hidden_SE: Tensor,
        planned: Sequence[ScheduledRequest],
        numbers: Sequence[int],
        row_S: Tensor,
        position_S: Tensor,
        extras: StepExtras | None = None,
    ) -> LaunchedStep:
        layout = self._rank.layout
        if not layout.is_last:
            if layout.is_first:
                drawn = (number for row, number in zip(planned, numbers, strict=True) if row.samples)
                self._feedback.post_receive(row_S, drawn)
            return LaunchedStep(self._device.record(), None, None)
        sampling = [row for row in planned if row.samples]
        requests = [row.request for row in sampling for _ in range(1 + len(row.drafts))]
        logits_SV = self._model.logits(hidden_SE, self._adapters.of_logits(requests))
        if len(requests) > len(sampling):
            sampled = self._sampler.draw_verified(logits_SV, sampling, row_S, position_S)
        else:
            sampled = self._sampler.draw(logits_SV, requests, row_S, position_S)
        if not layout.is_first:
            self._feedback.send(sampled.ids_S)
        return self._queue_results(sampled, extras)

    def _queue_results(self, sampled: DeviceSamplerOutput, extras: StepExtras | None = None) -> LaunchedStep:
        host_SC = to_host(sampled.numbers_SC, self._device)
        return LaunchedStep(self._device.record(), sampled, host_SC, extras)

    def _draw_by_graph(self, plan: StepPlan, size: int) -> LaunchedStep | None:
        """Sample a decoding step by the graph that follows the one of its hidden states; None where there is
        none, or a row needs more than its logits.
        """
        rows, graphs = plan.rows, self._graphs_of(plan.rows)
        if graphs is None or not graphs.draws(size) or not all(map(draws_plainly, rows)):
            return None
        if self._adapters.change_head and self._adapters.are_of(rows):
            return None
        graphs.replay_draw(size)
        requests = [row.request for row in rows for _ in range(row.num_tokens)]
        return self._queue_results(DeviceSamplerOutput.of_plain(self._numbers_R3[: len(requests)], requests))

    def _draw(self, size: int) -> None:
        """Sample the first `size` rows of `_hidden_RE` and write to `_numbers_R3`: the body of graphs."""
        row_N, end_N = self._decoding_of(size)[:2]
        logits_NV = self._model.logits(self._hidden_RE[:size])
        self._numbers_R3[:size].copy_(self._sampler.draw_plain(logits_NV, row_N, end_N + self.lag))

    def _decoding_of(self, size: int) -> Tensor:
        """Return the inputs [4, size] of a decoding step: state row and length of each row, the slot to save
        its recurrent state to, and its draft token.
        """
        return self._decoding[: 4 * size].view(4, size)

    def _decode(self, size: int, *, is_adapted: bool = False) -> None:
        """Decode the first `size` sequences and write hidden states to `_hidden_RE`: the body of graphs.

        `is_adapted`: apply adapters to the rows that `DeviceAdapters.tiles` names.
        """
        decoding_4N = self._decoding_of(size)
        ids_N, ragged = self._inputs.decode(
            decoding_4N,
            self._contexts[:size],
            with_drafts=self._sizes.draft_rows > 0,
            adapters=self._adapters.of_decoding(size) if is_adapted else None,
        )
        positions_N = None
        if self._has_mrope:  # images take fewer positions than rows
            positions_N = ragged.positions_T + self._rows.position_shifts(decoding_4N[0])
        # A decoding row is the last of its sequence, so that its position gives the length.
        short = self._rotary.short_context
        is_long = ragged.positions_T >= short if short else False
        hidden_NE = self._hidden(self._forward(ids_N, ragged, positions_N, is_long), None)
        if self._rank.layout.is_last:
            self._hidden_RE[:size].copy_(hidden_NE)
        if self._tapped_RF is not None:
            self._tapped_RF[:size].copy_(self._take_tapped())

    def profiled(self) -> ProfiledRunner:
        model, sampling = self._model, (self._sampler.draw, self._sampler.draw_verified)
        assert isinstance(model, Decoder)
        return ProfiledRunner(ops=model.ops, forward=model.hidden, model=model, sampling=sampling)

    def _hidden(self, forward: ForwardContext, rows_R: Tensor | None) -> Tensor:
        assert isinstance(self._model, Decoder)
        return self._model.hidden(forward, rows_R)

    def _take_tapped(self) -> Tensor:
        assert isinstance(self._model, Decoder)
        return self._model.take_tapped()

    def _forward_with_images(self, step: MixedStep, plan: StepPlan, encoded: EncodedImages) -> ForwardContext:
        """Return the inputs of a step with requests that have images, be their rows in it or not."""
        ragged = encoded.split(step.ragged, plan.rows)
        forward = self._forward(step.ids_T, ragged, encoded.positions(plan.rows), step.is_long)
        images = encoded.rows(plan.rows, plan.embeddings)
        if images is not None:
            forward.ids_T.index_fill_(0, images.rows_R, encoded.config.pad_id)
        return replace(forward, images=images)

    def _forward(
        self,
        ids_T: Tensor,
        ragged: BatchLayout,
        rope_positions: Tensor | None = None,
        is_long: Tensor | bool = False,
    ) -> ForwardContext:
        """`rope_positions`: where they are not those of the tokens. `is_long`: as in `Rotary.rows`."""
        positions = ragged.positions_T if rope_positions is None else rope_positions
        rope = self._rotary.rows(positions, is_long)
        return self.caches.inputs(ids_T, rope, ragged, self._windows)

    def _is_decoding(self, plan: StepPlan) -> bool:
        """Return True if all rows continue sequences. The last token of a prompt may be an image's."""
        if not is_decoding(plan, is_recurrent=self.caches.states is not None):
            return False
        return self.images is None or not self.images.has_rows(plan.rows)
