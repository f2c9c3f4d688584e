"""Data types of the operations: expert layers, the KV cache's shape and the layout of a batch."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .activation import Activation, LimitedSwiGLU
from .lora import AdaptedRows, ExpertAdapters

CosSin = Callable[[Tensor], tuple[Tensor, Tensor]]
CopyRuns = Callable[[int, int, int, int, int, int], None]
"""(address, step, address, step, size, count): copy `count` runs of `size` bytes that are so many bytes apart
from the first address to the second. Runs beside other threads of the interpreter.
"""
PopulateBlocks = Callable[[Any, range, ctypes.c_int], bool]
"""(cache, blocks, stop): give blocks in host memory their pages, whatever they hold, a layer at a time until
`stop` is not 0; False: not possible here. Runs beside other threads of the interpreter.
"""


def cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos(), angle.sin()


Scoring = Literal["softmax", "sigmoid", "sigmoid_of_logits"]
"""Scores of experts. The last are sigmoids too, but experts are chosen by their logits."""
SCORINGS: Final[tuple[Scoring, ...]] = ("softmax", "sigmoid", "sigmoid_of_logits")
"""Codes of the C++ kernels are places in this list."""
"""Function that turns a row's router logits into scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Rule by which a row chooses experts and weighs them: the best ones by score plus correction, with the
    scores as weights.

    With groups only experts of the `top_groups` best groups are chosen; a group is as good as the sum of its
    `group_best` best experts.
    """

    scoring: Scoring = "softmax"
    scale: float = 1.0
    """Multiplier of the weights."""
    groups: int = 1
    """Number of equal groups of neighboring experts."""
    top_groups: int = 1
    group_best: int = 1
    correction_X: Tensor | None = None
    """float32, added to the scores where experts are chosen, or to logits."""
    jitter: float = 0.0
    """SparseMixer without noise, where it is not 0: experts are chosen one after the other, each with its
    share of a softmax over the rest, without those whose logits are more than 2 `jitter` below the best,
    relative to the larger of the best logit and their own absolute one."""
    factors_X: Tensor | None = None
    """float32, by which the weights are multiplied at last."""
    scales_inputs: bool = False
    """True if weights multiply what experts read, and results are summed as they are."""

    @property
    def is_plain(self) -> bool:
        return self.scoring == "softmax" and self.groups == 1 and self.correction_X is None


@dataclass(frozen=True, slots=True)
class ExpertOwners:
    """Ranks that hold the experts of a layer, several of them the busiest ones. Which of them computes a row
    is decided in each step, alike on all ranks. Experts may change places between two steps
    (`Mixture.place`).
    """

    holders: Sequence[Sequence[int]]
    """Ranks that hold each expert, ascending."""
    rank: int
    """This rank."""
    ranks: int
    load_R: Tensor | None = None
    """int64, to which each step adds the rows that each rank computes; None: nobody counts them."""
    places_X: Tensor = field(init=False)
    """int32: number of each expert among those that are here, -1 for others. Recorded operations read it."""
    holder_bits_X: Tensor = field(init=False)
    """int32: a bit for each rank of `holders`."""

    def __post_init__(self) -> None:
        holders, held = list(self.holders), _held_by(self.holders, self.rank)
        object.__setattr__(self, "holders", holders)
        object.__setattr__(self, "places_X", torch.empty(len(holders), dtype=torch.int32))
        object.__setattr__(self, "holder_bits_X", torch.empty(len(holders), dtype=torch.int32))
        self.place(held, holders)

    def place(self, held: Sequence[int], holders: Sequence[Sequence[int]]) -> None:
        """Set, in place, the experts that are here in the order of their linears, and who holds each."""
        self.holders[:] = holders  # type: ignore[index] # a list
        self.places_X.fill_(-1)
        self.places_X[list(held)] = torch.arange(len(held), dtype=torch.int32)
        self.holder_bits_X.copy_(torch.tensor([sum(1 << rank for rank in ranks) for ranks in holders]))


def _held_by(holders: Sequence[Sequence[int]], rank: int) -> list[int]:
    return [expert for expert, ranks in enumerate(holders) if rank in ranks]


class ExpertResults(NamedTuple):
    """Results of a row's experts before they are added up. Rows that other ranks compute are zeros."""

    rows_TKE: Tensor
    """[T, K E], the best expert first."""
    shares_TK: Tensor
    """float32, by which the results are multiplied."""
    owners_TK: Tensor
    """int32: the rank that computes each."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of one MoE layer: one packed linear for each expert that is here, or one for all of these
    (`Ops.pack_experts`).
    """

    gate_ups: Sequence[Any]
    """[2 F, E], gate first; [F, E] without gates (`UNGATED`)."""
    downs: Sequence[Any]
    """[E, F]."""
    count: int
    per_token: int
    normalized: bool
    """True if the routing weights of the chosen experts are normalized to sum to one."""
    routing: Routing = field(default_factory=Routing)
    activation: Activation | LimitedSwiGLU = "silu"
    held: Sequence[int] | None = None
    """Experts whose linears are here, in the order of these, ascending until `place` was called; None: all. A
    row's result lacks what it chose among the others."""
    load_X: Tensor | None = None
    """int64, to which each step adds the rows that chose each expert; None: nobody counts them."""
    owners: ExpertOwners | None = None
    """Ranks among which the rows of `Ops.expert_results` are divided; `Ops.experts` needs none."""

    @property
    def here(self) -> Sequence[int]:
        return range(self.count) if self.held is None else self.held

    def place(self, held: Sequence[int], holders: Sequence[Sequence[int]]) -> None:
        """Set the experts that are here now, in the order of the linears, and who holds each. The caller has
        changed the linears, between two steps.
        """
        assert self.owners is not None
        if self.held is not None:
            self.held[:] = held  # type: ignore[index] # a list
        self.owners.place(held, holders)


class Experts(Protocol):
    def __call__(
        self,
        mixture: Mixture,
        x_TE: Tensor,
        logits_TX: Tensor,
        shared_TE: Tensor | None = None,
        gate_T1: Tensor | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """Fused MoE: (mixture, x_TE, logits_TX of its router) -> new tensor [T, E]. `adapters`: of
        experts, where `lora` is set.

        A row's result is the sum of down(activation(gate(x)) * up(x)) over its `per_token` best experts, each
        times its weight (`Routing`, `reference/moe.py`), plus its row of `shared_TE`, which is multiplied by
        the sigmoid of `gate_T1` where that is given.

        Each expert's result is computed as by `linear` and `gate_mul`. A row's results are summed in float32,
        the best expert first (of equally good ones the lower number) and the shared row last, and rounded
        once.
        """
        ...


class ComputeResults(Protocol):
    def __call__(
        self, mixture: Mixture, x_TE: Tensor, logits_TX: Tensor, adapters: ExpertAdapters | None = None
    ) -> ExpertResults:
        """Compute what `Experts` adds up: this rank's share (`Mixture.owners`), new tensors. An expert's
        result has the same bits on each rank that holds it.
        """
        ...


class CombineResults(Protocol):
    def __call__(
        self, results: ExpertResults | None, shared_TE: Tensor | None = None, gate_T1: Tensor | None = None
    ) -> Tensor:
        """Add up results as `Experts` does, once rows of other ranks are filled in: new tensor [T, E]. None:
        only the shared row.
        """
        ...


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape and dtypes of a model's KV cache. G KV heads, each of D numbers a token."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """dtype of the stored keys and values; `compute_dtype` is the model's."""
    compute_dtype: torch.dtype
    is_windowed: bool = False
    """True for sliding-window layers with block tables of their own: `BatchLayout.window`."""
    latent: int = 0
    """Numbers of a key that are its value (MLA): backends other than C++ then store no values. 0: keys and
    values are apart."""


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Slots of recurrent state in a step; contiguous int32 tensors.

    Sequence n reads and writes slot `slots_N[n]`. After row `save_rows[i]`, for `save_starts[n] <= i <
    save_starts[n + 1]`, its state is also written to slot `save_slots[i]`. Rows of a sequence are ascending.
    A negative slot is none: such a sequence begins with a state of zero, and a state is not written there.
    """

    slots_N: Tensor
    save_starts_N1: Tensor
    save_rows: Tensor
    save_slots: Tensor


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """Blocks and slots of sliding-window layers, as in `BatchLayout`. Entries more than `WINDOW_MARGIN`
    tokens behind a window are no blocks of the sequence: 0 on CPUs, whose keys may be read, and are masked;
    on GPUs any, and not read.
    """

    block_tables_NB: Tensor
    slots_T: Tensor


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Layout of a step's ragged batch.

    Sequence n owns rows `query_starts[n] .. query_starts[n + 1] - 1` of every T-shaped tensor of the step.
    Its last row is at position `context_lens[n] - 1`, the rows before it at the positions before. Position p
    of a sequence is stored in block `block_tables[n, p // block_size]`, slot `p % block_size`. Tensors are
    contiguous int32 on the model's device; the lists hold the same numbers for Python.
    """

    block_size: int
    query_lens: Sequence[int]
    contexts: Sequence[int]
    query_starts_N1: Tensor
    context_lens_N: Tensor
    block_tables_NB: Tensor
    """Entries past a sequence's last block are 0 and must not be read as blocks."""
    positions_T: Tensor
    slots_T: Tensor
    """`block * block_size + offset` of each row: the slot that its key and value are written to."""
    window: "WindowLayout | None" = None
    """For models whose sliding-window layers have blocks of their own."""
    states: StateLayout | None = None
    """For models with recurrent layers."""
    spans_N: Tensor | None = None
    """For models whose rows of an image see each other: 0 for rows that see positions up to their own, 1 for
    a sequence whose rows see all of them up to its last, 2 for one that does so in layers with a sliding
    window alone."""
    adapters: AdaptedRows | None = None
    """Rows that have a LoRA adapter; None: no row has one."""

    def for_cache(self, *, is_windowed: bool) -> "BatchLayout":
        """Return the layout with the blocks and slots of this cache (`KVShape.is_windowed`)."""
        if not is_windowed or self.window is None:
            return self
        window = self.window
        return replace(self, block_tables_NB=window.block_tables_NB, slots_T=window.slots_T)


class KernelTime(NamedTuple):
    """Time of the operations of one kind, in seconds."""

    name: str
    seconds: float
    waited: float
    """Part in which a thread waited for slower ones, mean of the threads."""
    floor: float
    """Time that reading the weights or multiplying alone takes, the longer of both for each operation."""
    reading: float
    """Part of `floor` in which reading takes longer."""


class KernelProfiler(Protocol):
    """Time of operations by kind, counted between `start` and `stop`, and the rates that bound it."""

    def start(self, read_rate: float, product_rate: float) -> None: ...
    def stop(self) -> None: ...
    def seconds(self) -> float:
        """Return the time of all kinds since the start."""
        ...

    def read(self) -> list[KernelTime]: ...
    @property
    def threads(self) -> int: ...
    def read_rate(self, packed: Any) -> float:
        """Return bytes a second at which all threads together read packed weights; 0: not known."""
        ...

    def product_rate(self, ops: Any) -> float:
        """Return products a second of the linears of `ops`, with weights that caches hold."""
        ...


@dataclass(frozen=True, slots=True)
class AltUpOps:
    """Operations of Gemma 3n on rows of several streams, [T, N E], one stream after another, and on gates of
    which few stay. `routed_TN` are float32 results of `Ops.logits`; coefficients are float32.
    """

    predict: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(x [T, N E], routed_TN, coefs_JN of N N rows) -> new tensor [T, N E]: each stream j of x plus the sum
    of all streams i times (coefs tanh(routed))[N j + i].
    """

    correct: Callable[[Tensor, Tensor, int, Tensor, Tensor], Tensor]
    """(predicted [T, N E], x_TE, stream, routed_TN, coefs_NN) -> new tensor [T, N E]: each stream j of
    `predicted` plus 1 + (coefs tanh(routed))[j] times the difference of x and the predicted `stream`.
    """

    add_to_others: Callable[[Tensor, Tensor], None]
    """(x [T, N E], added_TE): add to all streams but the first, in place."""

    match_size: Callable[[Tensor, Tensor, float], None]
    """(x [T, M E], like_TE with strided rows, eps): multiply each of M parts of a row in place, so that the
    root of its mean square is that of `like`; its own mean square counts as `eps` at least.
    """

    gate_sums: Callable[[Tensor], Tensor]
    """(gate_TF with strided rows) -> new tensor [T, 2] in float32: sum and sum of squares."""

    cut_gates: Callable[[Tensor, Tensor, int, float], None]
    """(gate_TF with strided rows, sums_T2 over `width` numbers, width, factor): max(0, gate - (mean + factor
    deviation)), in place.
    """
