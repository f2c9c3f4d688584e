"""Input batch of a step: flat tensors of token ids, positions, block tables and slots.

Numbers are collected in `array`s by slices and ranges, so that a prompt of thousands of tokens costs no
Python per token, and copied to the device once per tensor.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout, StateLayout, WindowLayout

from ..core.request import Request
from ..core.step import ScheduledRequest
from ..device.device import from_array, move, to_device
from ..model.rotary import Rotary
from ..weights.adapters import AdapterLayers
from .draft_verification import group_by_draft_position


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of one request whose logits give the log-probabilities of the next prompt tokens."""

    request: Request
    next_ids: Sequence[int]

    @property
    def top(self) -> int:
        """Number of alternatives that the request wants."""
        return self.request.params.prompt_logprobs or 0


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Contiguous pooled rows of one request."""

    request: Request
    count: int


def pooled_rows(row: ScheduledRequest) -> range:
    """Return the rows of this step that are pooled, counted from `row.start`."""
    match row.request.params.pooling:
        case "mean":
            return range(row.num_tokens)
        case "last" if row.end == row.request.num_tokens:
            return range(row.num_tokens - 1, row.num_tokens)
        case "cls" if row.start == 0:
            return range(1)
        case _:
            return range(0)


class ScoredRows:
    """Rows of a step whose logits or states are wanted beside those that sample: for log-probabilities of
    prompts, and for pooling.
    """

    def __init__(self) -> None:
        self.prompt_rows, self.next_ids, self.vector_rows = array("q"), array("q"), array("q")
        """Rows of `prompts`, the prompt token after each, and rows of `pooled`."""
        self.prompts: list[PromptRows] = []
        self.pooled: list[PooledRows] = []

    def add(self, row: ScheduledRequest, first: int) -> None:
        """Add those of a request. `first`: its first row in the step."""
        request = row.request
        if request.params.prompt_logprobs is not None and row.start < request.num_prompt - 1:
            end = min(row.end, request.num_prompt - 1)
            next_ids = request.token_ids[row.start + 1 : end + 1]
            self.prompt_rows.extend(range(first, first + end - row.start))
            self.next_ids.extend(next_ids)
            self.prompts.append(PromptRows(request, next_ids))
        if request.pools and (own := pooled_rows(row)):
            self.vector_rows.extend(range(first + own.start, first + own.stop))
            self.pooled.append(PooledRows(request, len(own)))


SlotRows = Iterable[tuple[int, range]]
"""Slot of an adapter and the rows that it changes."""


def slots_of_rows(rows: Iterable[ScheduledRequest]) -> SlotRows:
    """Yield the adapter's slot of each request, and its rows of the step."""
    first = 0
    for row in rows:
        end = first + row.num_tokens
        yield row.request.adapter_slot, range(first, end)
        first = end


def slots_of_requests(requests: Iterable[Request]) -> SlotRows:
    """Yield the adapter's slot of each request, where each has one row."""
    return ((request.adapter_slot, range(n, n + 1)) for n, request in enumerate(requests))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Input tensors of a step, and which of its rows are sampled, scored or pooled."""

    ids_T: Tensor
    ragged: BatchLayout
    wanted_R: Tensor | None
    """Rows whose hidden states are wanted: sampling rows, prompt rows, pooled rows. None: all rows sample, in
    order."""
    rounds: list[list[ScheduledRequest]]
    """Sampling rows grouped by draft position, see `draft_verification.py`."""
    num_sampled: int
    """Number of rows of all rounds."""
    prompts: list[PromptRows]
    pooled: list[PooledRows]
    fresh_blocks: list[int]
    """Result of `begun_blocks`."""


def build_batch(
    rows: Sequence[ScheduledRequest],
    block_size: int,
    device: torch.device,
    *,
    with_windows: bool = False,
    with_states: bool = False,
    adapters: AdapterLayers | None = None,
) -> StepBatch:
    """Flatten scheduled rows into the tensors of one forward pass. `with_windows`: sliding-window layers have
    blocks of their own. `with_states`: the model has recurrent layers. `adapters`: where some are in memory.
    """
    ids, positions, starts = array("q"), array("i"), array("i", [0])
    scored, last_known = ScoredRows(), {}
    for row in rows:
        request, first = row.request, starts[-1]
        ids.extend(request.token_ids[row.start : row.end])
        ids.extend(row.drafts)
        positions.extend(range(row.start, row.end))
        starts.append(first + row.num_tokens)
        if row.samples:
            last_known[request] = starts[-1] - 1 - len(row.drafts)
        scored.add(row, first)
    rounds = group_by_draft_position(rows)
    sampled_rows = array("q", [last_known[row.request] + j for j, part in enumerate(rounds) for row in part])
    in_order = len(sampled_rows) == starts[-1] and (len(rounds) == 1 or len(rows) == 1)
    wanted = None
    if scored.prompts or not in_order:
        wanted = sampled_rows + scored.prompt_rows + scored.vector_rows
    layout = ragged(rows, starts, positions, block_size, device)
    if with_windows:
        window = WindowLayout(*block_slots(rows, positions, block_size, device, sliding_table))
        layout = replace(layout, window=window)
    if adapters is not None:
        layout = replace(layout, adapters=adapters.group(slots_of_rows(rows), device))
    return StepBatch(
        ids_T=to_device(ids, device),
        ragged=replace(layout, states=state_layout(rows, starts, device)) if with_states else layout,
        wanted_R=None if wanted is None else to_device(wanted, device),
        rounds=rounds,
        num_sampled=len(sampled_rows),
        prompts=scored.prompts,
        pooled=scored.pooled,
        fresh_blocks=begun_blocks(rows, block_size),
    )


def decodes(row: ScheduledRequest) -> bool:
    """Return True for a row of one token whose next one is sampled."""
    return row.samples and row.num_tokens == 1 and row.request.params.prompt_logprobs is None


class DecodingInputs:
    """Inputs of steps on a CPU whose rows all decode (`decodes`): what `build_batch` makes, in tensors that
    the next step of as many rows and blocks writes over.

    The weights of a step push everything else out of the caches, so whatever runs between two steps waits for
    memory: a call of PyTorch takes 10 microseconds there.
    """

    def __init__(self, count: int, width: int, block_size: int) -> None:
        """`count`: number of rows. `width`: number of blocks of the longest row."""
        self.shape = count, width
        self._block_size = block_size
        self._ids = array("q", bytes(8 * count))
        self._numbers = array("i", [*range(count + 1), *bytes(count * (3 + width))])
        self._contexts = [0] * count
        self._ids_T = from_array(self._ids)
        sizes = [count + 1, count, count, count, count * width]
        starts_N1, contexts_N, positions_T, slots_T, tables_B = torch.split(from_array(self._numbers), sizes)
        self._layout = BatchLayout(
            block_size=block_size,
            query_lens=[1] * count,
            contexts=self._contexts,
            query_starts_N1=starts_N1,
            context_lens_N=contexts_N,
            block_tables_NB=tables_B.view(count, width),
            positions_T=positions_T,
            slots_T=slots_T,
        )

    def fill(self, rows: list[ScheduledRequest]) -> StepBatch:
        """Build the batch of `rows`. It is valid until the next call."""
        block_size, (count, width) = self._block_size, self.shape
        positions, contexts = [row.start for row in rows], [row.end for row in rows]
        slots, tables, fresh = [], [], []
        for row, position in zip(rows, positions, strict=True):
            table = row.request.block_table
            whole, offset = divmod(position, block_size)
            slots.append(table[whole] * block_size + offset)
            tables += table[: whole + 1]
            tables += [0] * (width - whole - 1)
            if not offset and block_size > 1:
                fresh.append(table[whole])
        self._contexts[:] = contexts
        self._numbers[count + 1 :] = array("i", [*contexts, *positions, *slots, *tables])
        self._ids[:] = array("q", [row.request.token_ids[row.start] for row in rows])
        return StepBatch(self._ids_T, self._layout, None, [rows], count, [], [], fresh)


def long_rows(rows: Sequence[ScheduledRequest]) -> "bool | array[int]":
    """Return whether the sequences of a step are longer than LongRoPE's original context: one answer for all
    of them, or a 0 or 1 for each row of the step.
    """
    flags = {row.request.is_long for row in rows}
    if len(flags) < 2:
        return True in flags
    numbers = array("i")
    for row in rows:
        numbers.extend([int(row.request.is_long)] * row.num_tokens)
    return numbers


def rope_rows(rotary: Rotary, rows: Sequence[ScheduledRequest], positions_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cos and sin rows of a step."""
    is_long = long_rows(rows) if rotary.short_context else False
    is_decoding = positions_T.dim() == 1 and len(rows) == len(positions_T)
    if isinstance(is_long, bool) and is_decoding and positions_T.device.type == "cpu":
        return rotary.decoding_rows(positions_T, [row.start for row in rows], is_long=is_long)
    flags = is_long if isinstance(is_long, bool) else to_device(is_long, positions_T.device).bool()
    return rotary.rows(positions_T, flags)


def state_layout(rows: Sequence[ScheduledRequest], starts: "array[int]", device: torch.device) -> StateLayout:
    """Return the slots that a step reads, writes and saves to. Rows without a slot, of warm-ups, use the
    first.
    """
    slots = array("i", [max(0, row.request.state_slot) for row in rows])
    return StateLayout(*(to_device(each, device) for each in (slots, *saves_of(rows, starts))))


def saves_of(
    rows: Sequence[ScheduledRequest], starts: "array[int]"
) -> tuple["array[int]", "array[int]", "array[int]"]:
    """Return the last three fields of a `StateLayout`. `starts`: first row of each sequence, and the end."""
    save_starts, save_rows, save_slots = array("i", [0]), array("i"), array("i")
    for row, first in zip(rows, starts, strict=False):
        for position, slot in row.saves:
            save_rows.append(first + position - 1 - row.start)
            save_slots.append(slot)
        save_starts.append(len(save_rows))
    return save_starts, save_rows, save_slots


BlockTable = Callable[[Request], list[int]]


def block_table(request: Request) -> list[int]:
    return request.block_table


def sliding_table(request: Request) -> list[int]:
    return request.sliding_table


def begun_blocks(
    rows: Sequence[ScheduledRequest], block_size: int, table: BlockTable = block_table
) -> list[int]:
    """Return the KV blocks whose first slot this step writes and whose last slot it does not."""
    begun = []
    for row in rows:
        last_block, filled = divmod(row.start + row.num_tokens, block_size)
        if filled and row.start <= last_block * block_size:
            begun.append(table(row.request)[last_block])
    return begun


def ragged(
    rows: Sequence[ScheduledRequest],
    starts: "array[int]",
    positions: "array[int]",
    block_size: int,
    device: torch.device,
) -> BatchLayout:
    lens, contexts = [row.num_tokens for row in rows], [row.end for row in rows]
    tables_NB, slots_T = block_slots(rows, positions, block_size, device, block_table)
    return BatchLayout(
        block_size=block_size,
        query_lens=lens,
        contexts=contexts,
        query_starts_N1=to_device(starts, device),
        context_lens_N=to_device(array("i", contexts), device),
        block_tables_NB=tables_NB,
        positions_T=to_device(positions, device),
        slots_T=slots_T,
    )


def block_slots(
    rows: Sequence[ScheduledRequest],
    positions: "array[int]",
    block_size: int,
    device: torch.device,
    table: BlockTable,
) -> tuple[Tensor, Tensor]:
    """Return the block tables of all sequences, padded with zeros, and the slot of each row."""
    lens, contexts = [row.num_tokens for row in rows], [row.end for row in rows]
    width = max(-(-context // block_size) for context in contexts)
    tables = array("i")
    for row, context in zip(rows, contexts, strict=True):
        blocks = -(-context // block_size)
        tables.extend(table(row.request)[:blocks])
        tables.extend([0] * (width - blocks))
    tables_NB = from_array(tables).view(len(rows), width)
    if len(positions) == len(rows):  # one row each: torch takes longer to begin than this takes
        slots = array("i")
        for number, position in enumerate(positions):
            block = tables[number * width + position // block_size]
            slots.append(block * block_size + position % block_size)
        return move(tables_NB, device), to_device(slots, device)
    positions_T = from_array(positions)
    row_T = torch.repeat_interleave(torch.tensor(lens))
    slots_T = tables_NB[row_T, positions_T // block_size] * block_size + positions_T % block_size
    return move(tables_NB, device), move(slots_T, device)
