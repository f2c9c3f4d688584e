"""Synchronous model runner: flattens a step plan, runs one forward pass and samples. Owns model and KV cache.

T rows of the step, R rows whose logits are wanted, S of them to sample, E hidden.
"""

import ctypes
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from llmbox.kernels.ops import KVCache

from ..core.step import ImagePiece, ProfiledRunner, ScheduledRequest, StepPlan, StepResult
from ..device.device import HostDevice
from ..ipc.messages import TokenLogprobs
from ..model.decoder import Decoder
from ..model.forward_context import ForwardContext
from ..model.rotary import Rotary
from ..planning.memory_model import PROMPT_LOGPROB_ROWS
from ..sampling import Sampler
from ..sampling.sampler import is_plain, take_best
from ..weights.loaded_adapters import LoadedAdapters
from .block_memory import DeviceBlockMemory, ModelCaches
from .draft_verification import requests_with_nan, result_of, verify_drafts
from .image_rows import EncodedImages
from .input_batch import (
    DecodingInputs,
    PromptRows,
    StepBatch,
    begun_blocks,
    build_batch,
    decodes,
    rope_rows,
    sliding_table,
    slots_of_requests,
)
from .prompt_results import read_sums, sum_states

if TYPE_CHECKING:
    from .draft_head import HeadProposer

POPULATED_AHEAD: Final = 128 << 20
"""Bytes of KV memory that are made ready while nothing runs: about a thousand tokens of a small model."""
SCORED_AT_ONCE: Final = 16
"""Most rows of a step that runs as one list: longer steps gain little, and its logits are kept."""
POPULATED_AT_ONCE: Final = 2 << 20
"""Bytes of a layer that are made ready at once: a step that comes, or the process's end, waits for them."""


class CPUModelRunner:
    """Runner of one rank on a CPU."""

    def __init__(
        self,
        model: Decoder,
        rotary: Rotary,
        caches: ModelCaches,
        sampler: Sampler,
        *,
        block_size: int,
        device: torch.device,
        images: EncodedImages | None = None,
        lora_bytes: int = 0,
    ) -> None:
        """`images`: embeddings of images, for a model with a vision tower. `lora_bytes`: most bytes of
        adapters.
        """
        self._model = model
        self._ops = model.ops
        self._rotary = rotary
        self.caches = caches
        self.images = images
        if caches.has_window_blocks:  # blocks behind a window are 0, and are read
            self._ops.clear_blocks(caches.window, [0])
        self._sampler = sampler
        self._block_size = block_size
        self._device = device
        self._windows = set(model.config.windows)
        self.adapters = LoadedAdapters(model.adapters, model.dtype, model.rank, lora_bytes)
        self._decoding: DecodingInputs | None = None
        self._follower: HeadProposer | None = None
        self._taps = False
        self._begun_blocks = self._populated_blocks = 0
        """Numbers below which blocks have been used, and have their pages."""
        self._populating: threading.Thread | None = None
        self._is_busy = ctypes.c_int(1)
        """Not 0 while a step runs: no blocks get pages beside it."""

    def attach(self, proposer: "HeadProposer", cache: KVCache, taps: Sequence[int] = ()) -> None:
        """Show the hidden states of each later step to a draft head. `cache`: the head's KV cache, if it has
        one. `taps`: layers whose inputs it reads in place of the last hidden states.
        """
        self._follower, self._taps = proposer, bool(taps)
        if taps:
            self._model.tap(taps)
        if cache is not None:
            self.caches.add(cache)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step. Decoding rows come first, sorted by context: attention batches neighbors."""
        self._is_busy.value = 1
        if plan.adapter_loads:
            self.adapters.load(plan.adapter_loads)
        self.caches.copy(plan)
        rows = sorted(plan.rows, key=lambda row: (row.num_tokens > 1, row.end))
        batch = self._build_batch(rows)
        self._begun_blocks = max(self._begun_blocks, *batch.fresh_blocks, 0)
        self.caches.clear(batch.fresh_blocks, lambda: begun_blocks(rows, self._block_size, sliding_table))
        images = self.images
        if images is not None and not any(row.request.images for row in rows):
            images = None
        if images is not None:
            batch = replace(batch, ragged=images.split(batch.ragged, rows))
        forward = self._forward(batch, rows)
        if images is not None:
            forward = self._with_images(forward, rows, images, plan.embeddings)
        if self._follower is not None:
            return self._execute_followed(forward, batch, rows, self._follower)
        if self._is_scored_at_once(batch, forward):
            return self._sample_at_once(forward, rows)
        return self._finish(self._model.hidden(forward, batch.wanted_R), batch, rows)

    def _build_batch(self, rows: list[ScheduledRequest]) -> StepBatch:
        caches = self.caches
        has_more = caches.has_window_blocks or caches.states is not None or bool(self.adapters)
        is_on_gpu = self._device.type != "cpu"  # without overlap this runner computes there too
        if is_on_gpu or has_more or self._follower is not None or not all(map(decodes, rows)):
            return build_batch(
                rows,
                self._block_size,
                self._device,
                with_windows=caches.has_window_blocks,
                with_states=caches.states is not None,
                adapters=self._model.adapters if self.adapters else None,
            )
        shape = len(rows), -(-max(row.end for row in rows) // self._block_size)
        if self._decoding is None or self._decoding.shape != shape:
            self._decoding = DecodingInputs(*shape, self._block_size)
        return self._decoding.fill(rows)

    def _is_scored_at_once(self, batch: StepBatch, forward: ForwardContext) -> bool:
        return (
            batch.wanted_R is None
            and len(batch.rounds) == 1
            and batch.num_sampled <= SCORED_AT_ONCE
            and forward.images is None
            and batch.ragged.adapters is None
            and self._model.has_scores
        )

    def _sample_at_once(self, forward: ForwardContext, rows: list[ScheduledRequest]) -> StepResult:
        """Run the rest of `execute` for a few rows that all sample: layers, head and the search for the
        likeliest ids are one list of operations.
        """
        with_best = self._sampler.finds_best and all(is_plain(row.request) for row in rows)
        logits_RV, *best = self._model.scores(forward, with_best=with_best)
        requests = [row.request for row in rows]
        result = result_of(rows, take_best(*best) if best else self._sampler.sample(logits_RV, requests))
        result.failed.update(self.adapters.failures(rows))
        return result

    def _execute_followed(
        self,
        forward: ForwardContext,
        batch: StepBatch,
        rows: list[ScheduledRequest],
        follower: "HeadProposer",
    ) -> StepResult:
        """Run the rest of `execute` and show the hidden states of all rows to the draft head."""
        hidden_TE = self._model.hidden(forward, None)
        features_TF = self._model.take_tapped() if self._taps else hidden_TE.clone()
        hidden_RE = hidden_TE if batch.wanted_R is None else hidden_TE[batch.wanted_R]
        result = self._finish(hidden_RE, batch, rows)
        follower.observe(rows, features_TF, result)
        return result

    def _finish(self, hidden_RE: Tensor, batch: StepBatch, rows: list[ScheduledRequest]) -> StepResult:
        """Sample, score and pool the wanted rows."""
        result = self._sample(hidden_RE[: batch.num_sampled], batch)
        rest_RE = hidden_RE[batch.num_sampled :]
        result.failed.update(self.adapters.failures(rows))
        if not self._model.is_last:
            return result
        result.prompt_logprobs.update(prompt_logprobs(self._model, self._sampler, rest_RE, batch.prompts))
        if batch.pooled:
            count = sum(rows.count for rows in batch.pooled)
            result.add(read_sums(sum_states(hidden_RE[-count:], batch.pooled), batch.pooled))
        return result

    def prepare(self) -> bool:
        """Have a thread give the KV blocks that are used next their pages, up to `POPULATED_AHEAD`, until a
        step begins: the first touch takes milliseconds a block, in the step of a prompt or in the copies of
        blocks from disk, which go on beside it. Blocks are used in the order of their numbers.
        """
        self._is_busy.value = 0
        if self._ops.populate_blocks is not None and (
            self._populating is None or not self._populating.is_alive()
        ):
            layers, count = (blocks := self._ops.block_tensors(self.caches.kv)[0]).shape[:2]
            layer_bytes = max(1, blocks.nbytes // count // layers)
            end = min(count, self._begun_blocks + 1 + POPULATED_AHEAD // (layers * layer_bytes))
            if max(self._populated_blocks, self._begun_blocks) < end:
                at_once = max(1, POPULATED_AT_ONCE // layer_bytes)
                self._populating = threading.Thread(
                    target=self._populate_up_to, args=(end, at_once), name="populate", daemon=True
                )
                self._populating.start()
        return False

    def _populate_up_to(self, end: int, at_once: int) -> None:
        """Populate blocks below `end`, some at a time in each layer: those of one layer lie side by side."""
        populate = self._ops.populate_blocks
        assert populate is not None
        while (first := max(self._populated_blocks, self._begun_blocks)) < end:
            last = min(end, first + at_once)
            for cache in self.caches.full:
                if not populate(cache, range(first, last), self._is_busy):
                    self._populated_blocks = sys.maxsize
                    return
                if self._is_busy.value:
                    return
            self._populated_blocks = last

    def populate(self) -> None:
        """Populate the pages of all KV blocks now, before any step has to wait for them."""
        populate, count = self._ops.populate_blocks, self._ops.block_tensors(self.caches.kv)[0].shape[1]
        if populate is not None:
            goes_on = ctypes.c_int(0)
            if all(populate(cache, range(count), goes_on) for cache in self.caches.full):
                self._populated_blocks = count

    @property
    def model(self) -> Decoder:
        return self._model

    def profiled(self) -> ProfiledRunner:
        model, sampling = self._model, (self._sampler.sample,)
        return ProfiledRunner(ops=model.ops, forward=model.hidden, model=model, sampling=sampling)

    def block_memory(self) -> DeviceBlockMemory:
        """Return access to the bytes of its KV blocks and recurrent states."""
        return self.caches.memory(HostDevice())

    def _forward(self, batch: StepBatch, rows: Sequence[ScheduledRequest]) -> ForwardContext:
        rope = rope_rows(self._rotary, rows, batch.ragged.positions_T)
        return self.caches.inputs(batch.ids_T, rope, batch.ragged, self._windows)

    def _with_images(
        self,
        forward: ForwardContext,
        rows: list[ScheduledRequest],
        encoded: EncodedImages,
        sent: Mapping[ImagePiece, bytes],
    ) -> ForwardContext:
        """Return the inputs of a step with requests that have images, be their rows in it or not."""
        images, positions_3T = encoded.rows(rows, sent), encoded.positions(rows)
        if images is not None:
            forward.ids_T[images.rows_R] = encoded.config.pad_id
        if positions_3T is None:
            return replace(forward, images=images)
        cos_ATD, sin_ATD = rope_rows(self._rotary, rows, positions_3T)
        return replace(forward, images=images, cos_ATD=cos_ATD, sin_ATD=sin_ATD)

    def _sample(self, hidden_SE: Tensor, batch: StepBatch) -> StepResult:
        if not batch.num_sampled or not self._model.is_last:
            return StepResult()
        doubtful = requests_with_nan(hidden_SE, batch.rounds)
        adapted, adapters = None, self._model.adapters
        if batch.ragged.adapters is not None and adapters is not None:
            slots = slots_of_requests(row.request for part in batch.rounds for row in part)
            adapted = adapters.group(slots, hidden_SE.device)
        return verify_drafts(self._sampler, self._model.logits(hidden_SE, adapted), batch.rounds, doubtful)


def prompt_logprobs(
    model: Decoder, sampler: Sampler, hidden_RE: Tensor, prompts: list[PromptRows]
) -> dict[str, list[TokenLogprobs]]:
    """Compute log-probabilities of prompt tokens from hidden states [R, E]; return entries by request id."""
    result: dict[str, list[TokenLogprobs]] = {}
    row = 0
    for prompt in prompts:
        entries = result[prompt.request.request_id] = []
        for start in range(0, len(prompt.next_ids), PROMPT_LOGPROB_ROWS):
            ids = prompt.next_ids[start : start + PROMPT_LOGPROB_ROWS]
            slot = prompt.request.adapter_slot
            adapted = None
            if slot >= 0 and model.adapters is not None:
                adapted = model.adapters.group([(slot, range(len(ids)))], hidden_RE.device)
            logits_RV = model.logits(hidden_RE[row : row + len(ids)], adapted)
            entries += sampler.prompt_logprobs(logits_RV, ids, prompt.top)
            row += len(ids)
    return result
