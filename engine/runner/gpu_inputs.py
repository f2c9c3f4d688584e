"""Inputs of one forward pass on a GPU, built from the request state on the device.

N sequences, T rows of the step, B blocks of a table, R rows of `DeviceRequestState`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from llmbox.kernels.lora import TILE_ROWS, LoraTiles
from llmbox.kernels.op_types import BatchLayout, StateLayout, WindowLayout
from llmbox.kernels.ops import Ops
from llmbox.kernels.sampling_types import DecodeInputs, DecodeRows

from ..core.kv_cache.state_manager import NO_SLOT
from ..core.request import Request
from ..core.step import ScheduledRequest
from ..device.device import Uploader
from ..model.decoder import Decoder
from ..model.draft_heads import DraftHead
from ..sampling.device_state import DeviceBlockTables, DeviceRequestState
from ..weights.loaded_adapters import LoadedAdapters
from .input_batch import (
    PooledRows,
    PromptRows,
    ScoredRows,
    SlotRows,
    long_rows,
    saves_of,
    slots_of_requests,
    slots_of_rows,
)

NO_DRAFT: Final = -1
"""In place of a draft token: the request's last token, which the device may know alone."""


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    block_size: int
    num_blocks: int
    """Blocks of the pool; the cache has one more, with the index `num_blocks`, for padding rows."""
    context: int
    max_running: int
    window_blocks: int = 0
    """Blocks of sliding-window layers, where they have blocks of their own; the cache has one more too."""
    draft_rows: int = 0
    """Most rows of a decoding step with draft tokens; 0: none has any."""
    vocab_size: int = 0
    """Number of ids to sample from, of a draft model those of its target; 0: the model's."""

    @property
    def rows(self) -> int:
        """Maximum number of rows of a decoding step."""
        return max(self.max_running, self.draft_rows)


@dataclass(frozen=True, slots=True)
class MixedStep:
    """Inputs of a step that contains prefills, so sequences have any number of rows."""

    ids_T: Tensor
    ragged: BatchLayout
    wanted_W: Tensor
    """Rows whose hidden states are wanted: sampling rows, those of `prompts`, those of `pooled`."""
    row_S: Tensor
    position_S: Tensor
    """Position of the token to sample."""
    prompts: list[PromptRows]
    next_P: Tensor
    """Next prompt token of each row of `prompts`."""
    pooled: list[PooledRows]
    is_long: Tensor | bool
    """True for sequences with LongRoPE's long factors: one answer for all rows, or one for each [T]."""


class DeviceAdapters(LoadedAdapters):
    """Adapters of a GPU's runner, and which rows of its steps have one."""

    def __init__(
        self, model: Decoder | DraftHead, rows: int, uploader: Uploader, device: torch.device
    ) -> None:
        """`rows`: most rows of a decoding step."""
        super().__init__(model.adapters, model.dtype, model.rank)
        self._uploader = uploader
        shape = LoraTiles.most(rows), 1 + TILE_ROWS
        self.tiles = torch.full(shape, -1, dtype=torch.int32, device=device)
        """Rows of a decoding step, an input of its graphs."""

    def load(self, loads: Sequence[tuple[int, str]]) -> bool:
        """Return also whether graphs that were captured before serve all adapters; the same on all ranks."""
        assert self._layers is not None
        before = self._layers.launches
        super().load(loads)
        serve = self._layers.launches == before
        return serve if self._rank.layout.ranks == 1 else self._rank.communicator.all_agree(serve)

    def are_of(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Return True if a row has an adapter."""
        return bool(self) and any(row.request.adapter_slot >= 0 for row in rows)

    def upload(self, rows: Sequence[ScheduledRequest], size: int) -> None:
        """Write the tiles of a decoding step of `size` rows."""
        upload_tiles(slots_of_rows(rows), self._uploader, self.of_decoding(size).tiles)

    def of_decoding(self, size: int) -> LoraTiles:
        return LoraTiles(self.tiles[: LoraTiles.most(size)])

    def of_logits(self, requests: Sequence[Request]) -> LoraTiles | None:
        """Return the tiles of rows of logits, one for each request, where an adapter changes them."""
        return upload_tiles(slots_of_requests(requests), self._uploader) if self.change_head else None

    @property
    def change_head(self) -> bool:
        """True if an adapter changes the output head."""
        return bool(self) and self._layers is not None and self._layers.changes_head


def upload_tiles(slots_T: SlotRows, uploader: Uploader, into: Tensor | None = None) -> LoraTiles | None:
    """Return the tiles of (slot, rows) on the device; None where no row has an adapter. `into`: buffer to
    write them to; the rest of it is marked as empty.
    """
    numbers = LoraTiles.numbers(slots_T)
    if not numbers and into is None:
        return None
    if into is not None:
        numbers.extend([-1] * (into.numel() - len(numbers)))
    (uploaded,) = uploader.upload(numbers)
    if into is None:
        return LoraTiles(uploaded.view(-1, 1 + TILE_ROWS), numbers)
    into.copy_(uploaded.view_as(into))
    return LoraTiles(into)


def prepare(ops: Ops, rows: DecodeRows, block_size: int) -> DecodeInputs:
    """Return positions, slots and contexts of rows whose last tokens are known."""
    if ops.prepare_decode_inputs is None:
        return decode_inputs_in_torch(rows.tables_RB, rows.lengths_R, block_size)
    inputs = DecodeInputs(*(torch.empty_like(rows.lengths_R) for _ in range(3)))
    ops.prepare_decode_inputs(rows, None, inputs, block_size)
    return inputs


def decode_inputs_in_torch(tables_NB: Tensor, length_N: Tensor, block_size: int) -> DecodeInputs:
    """Compute in plain torch what `Ops.prepare_decode_inputs` does without tokens.

    Padding rows see one slot of the padding block: kernels may rely on a non-empty context.
    """
    context_N = length_N.clamp(min=1)
    position_N = context_N - 1
    block_N = tables_NB.gather(1, (position_N // block_size).long().unsqueeze(1)).squeeze(1)
    return DecodeInputs(position_N, block_N * block_size + position_N % block_size, context_N)


class DeviceInputs:
    """Inputs of one runner's steps, built on the device from its request state and from uploads."""

    def __init__(
        self,
        ops: Ops,
        rows: DeviceRequestState,
        uploader: Uploader,
        block_size: int,
        *,
        with_states: bool = False,
        with_lengths: bool = False,
        lag: int = 0,
    ) -> None:
        """`with_states`: the model has recurrent layers. `with_lengths`: its RoPE tells long sequences from
        short ones. `lag`: slots by which keys lie before their tokens; 1 for heads, whose row of a token goes
        on from the hidden state of the one before.
        """
        self._ops, self._rows, self._uploader = ops, rows, uploader
        self._block_size = block_size
        self._with_states, self._with_lengths = with_states, with_lengths
        self._lag = lag

    def decoding_numbers(
        self, planned: Sequence[ScheduledRequest], numbers: Sequence[int], size: int
    ) -> tuple["array[int]", list[int]]:
        """Return the inputs of a decoding step of `size` rows, one after another: state row, length, slot to
        save to and draft token of each; and the lengths. `numbers`: state row of each scheduled request.

        A draft is a row like any other, a sequence of one row with the blocks of its request. Layers write
        the keys of all rows before any row attends, so it sees the drafts before it.
        """
        lag = self._lag
        owners, ends, drafts = list(numbers), [row.end - lag for row in planned], [NO_DRAFT] * len(planned)
        saves = [slot for row in planned for _, slot in row.saves or ((0, NO_SLOT),)]
        if any(row.drafts or row.num_tokens > 1 for row in planned):  # of a model without recurrent state
            owners, ends, drafts = [], [], []
            for row, number in zip(planned, numbers, strict=True):
                owners += [number] * row.num_tokens
                ends += range(row.start + 1 - lag, row.end + 1 - lag)
                drafts += [*row.request.token_ids[row.start : row.end], *row.drafts] or [NO_DRAFT]
            saves = [NO_SLOT] * len(ends)
        fill = size - len(ends)
        inputs = array("q", owners + [self._rows.spare] * fill)
        inputs.extend(ends + [0] * fill)
        inputs.extend(saves + [NO_SLOT] * fill)
        inputs.extend(drafts + [NO_DRAFT] * fill)
        return inputs, ends + [1] * fill

    def decode(
        self,
        decoding_4N: Tensor,
        contexts: Sequence[int],
        *,
        with_drafts: bool,
        adapters: LoraTiles | None = None,
    ) -> tuple[Tensor, BatchLayout]:
        """Return (ids_N, layout) of a decoding step, from device tensors alone. Length 0: a padding row.

        `decoding_4N`: result of `decoding_numbers` on the device. `with_drafts`: rows may be draft tokens.
        `adapters`: of the rows.
        """
        rows, block_size = self._rows, self._block_size
        row_N, length_N, save_N, draft_N = decoding_4N
        count = len(row_N)
        ids_N = rows.last_R.index_select(0, row_N)
        if with_drafts:
            ids_N = torch.where(draft_N < 0, ids_N, draft_N)
        tables_NB = rows.tables.blocks_RB.index_select(0, row_N)
        length_N = length_N.to(torch.int32)
        inputs = prepare(self._ops, DecodeRows(ids_N, length_N, tables_NB), block_size)
        window = None
        if rows.window_tables is not None:
            own_NB = rows.window_tables.blocks_RB.index_select(0, row_N)
            slots_N = prepare(self._ops, DecodeRows(ids_N, length_N, own_NB), block_size).slots_R
            window = WindowLayout(own_NB, slots_N)
        starts_N1 = torch.arange(count + 1, dtype=torch.int32, device=row_N.device)
        states = None
        if self._with_states:
            save_N = save_N.to(torch.int32)
            states = StateLayout(rows.state_slots(row_N), starts_N1, starts_N1[:count], save_N)
        layout = BatchLayout(
            block_size=block_size,
            query_lens=[1] * count,
            contexts=contexts,
            query_starts_N1=starts_N1,
            context_lens_N=inputs.context_lens_R,
            block_tables_NB=tables_NB,
            positions_T=inputs.positions_R,
            slots_T=inputs.slots_R,
            window=window,
            states=states,
            adapters=adapters,
        )
        return ids_N, layout

    def mixed(
        self, planned: Sequence[ScheduledRequest], numbers: Sequence[int], *, with_adapters: bool
    ) -> MixedStep:
        """Build the inputs of a step with prefills. `numbers`: state row of each scheduled request.
        `with_adapters`: rows have some.
        """
        flat, upload = _Flat(self._lag), self._uploader.upload
        for one, number in zip(planned, numbers, strict=True):
            flat.add(one, number)
        (
            ids_T, position_T, starts_N1, context_N, row_N, length_N,
            sampled, prompt, next_P, vector, row_S, position_S, hole, fill,
        ) = upload(
            flat.ids, flat.positions, flat.starts, flat.contexts, flat.rows, flat.lengths,
            flat.sampled, flat.scored.prompt_rows, flat.scored.next_ids, flat.scored.vector_rows,
            flat.sampled_rows, flat.sampled_positions, flat.holes, flat.fills,
        )  # fmt: skip
        if flat.holes:
            ids_T.index_copy_(0, hole, self._rows.last_R.index_select(0, fill))
        tables_NB, slots_T, window = self._place(flat, row_N, length_N, position_T)
        states = None
        if self._with_states:
            states = StateLayout(self._rows.state_slots(row_N), *upload(*saves_of(planned, flat.starts)))
        layout = BatchLayout(
            block_size=self._block_size,
            query_lens=list(flat.lengths),
            contexts=list(flat.contexts),
            query_starts_N1=starts_N1,
            context_lens_N=context_N,
            block_tables_NB=tables_NB,
            positions_T=position_T,
            slots_T=slots_T,
            window=window,
            states=states,
            adapters=upload_tiles(slots_of_rows(planned), self._uploader) if with_adapters else None,
        )
        is_long = long_rows(planned) if self._with_lengths else False
        return MixedStep(
            ids_T,
            layout,
            torch.cat((sampled, prompt, vector)),
            row_S,
            position_S,
            flat.scored.prompts,
            next_P,
            flat.scored.pooled,
            is_long if isinstance(is_long, bool) else upload(is_long)[0].bool(),
        )

    def _place(
        self, flat: "_Flat", row_N: Tensor, length_N: Tensor, position_T: Tensor
    ) -> tuple[Tensor, Tensor, WindowLayout | None]:
        """Return the block tables of the sequences, the slot of each row, and both for sliding-window layers
        with blocks of their own.
        """
        size, rows = self._block_size, self._rows
        width = -(-max(flat.contexts) // size)
        sequence_T = torch.repeat_interleave(
            torch.arange(len(row_N), device=row_N.device), length_N, output_size=len(flat.ids)
        )
        page_T, offset_T = (position_T // size).long(), position_T % size

        def place(tables: DeviceBlockTables) -> tuple[Tensor, Tensor]:
            tables_NB = tables.blocks_RB[:, :width].index_select(0, row_N)
            return tables_NB, tables_NB[sequence_T, page_T] * size + offset_T

        window = None if rows.window_tables is None else WindowLayout(*place(rows.window_tables))
        return *place(rows.tables), window


class _Flat:
    """Arrays of a step, filled by slices and ranges: a prompt of thousands of tokens costs no Python per
    token.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.ids, self.positions, self.starts = array("q"), array("i"), array("i", [0])
        self.contexts, self.rows, self.lengths = array("i"), array("q"), array("q")
        self.sampled, self.sampled_rows, self.sampled_positions = array("q"), array("q"), array("q")
        self.holes, self.fills = array("q"), array("q")
        self.scored = ScoredRows()

    def add(self, one: ScheduledRequest, number: int) -> None:
        request, first, end = one.request, self.starts[-1], one.end
        known = [*request.token_ids[one.start : end], *one.drafts]
        self.ids.extend(known)
        if len(known) < one.num_tokens:  # sampled in the previous step, not known on the host yet
            assert len(known) == one.num_tokens - 1
            self.holes.append(len(self.ids))
            self.fills.append(number)
            self.ids.append(0)
        self.positions.extend(range(one.start - self.lag, end - self.lag))
        self.starts.append(first + one.num_tokens)
        self.contexts.append(end - self.lag)
        self.rows.append(number)
        self.lengths.append(one.num_tokens)
        if one.samples:
            count = 1 + len(one.drafts)
            self.sampled.extend(range(self.starts[-1] - count, self.starts[-1]))
            self.sampled_rows.extend([number] * count)
            self.sampled_positions.extend(range(end + 1 - count, end + 1))
        if not self.lag:  # a head has no such rows
            self.scored.add(one, first)
