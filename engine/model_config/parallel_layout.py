"""Parallel layout: the shard of a model that each rank holds.

rank = stage · tp + tp_rank

q, k, v, gate, up, vocabulary   column-parallel: outputs in tp equal parts
o, down                         row-parallel: inputs in tp equal parts, results all-reduced over the stage
KV heads                        in tp equal parts, or one head on each tp / kv_heads ranks
experts                         each as gate, up and down; with expert parallelism whole, some on each rank
layers                          in pp stages; the first has the embedding, the last has final norm and head
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from llmbox.kernels.quant_formats import Quant

from ..checkpoint.safetensors import ShardSlice
from ..errors import ParallelError
from .shape import ModelShape

MAX_RANKS = 16
ExpertPlacement = Sequence[Sequence[Sequence[int]]]
"""TP ranks that have each expert, ascending: [layer with experts][expert]."""


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Position of one rank in a tp x pp grid, and the slices that it holds."""

    tp: int = 1
    pp: int = 1
    rank: int = 0
    expert_parallel: bool = False
    """True if each rank of a stage has some experts whole, instead of a part of each."""
    placement: ExpertPlacement = ()
    """Ranks that have each expert, where hot ones have several; empty: each expert is on one."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.pp - 1

    @property
    def other_end(self) -> int:
        """Rank with the same `tp_rank` in the last stage for one in the first, and vice versa."""
        return self.tp_rank if self.is_last else self.answers + self.tp_rank

    @property
    def answers(self) -> int:
        """Rank that samples tokens: the first of the last stage."""
        return (self.pp - 1) * self.tp

    @property
    def stage_ranks(self) -> list[int]:
        return [self.stage * self.tp + i for i in range(self.tp)]

    @property
    def shard(self) -> str:
        """Name of this rank's shard of a model; empty for a single rank."""
        if self.ranks == 1:
            return ""
        whole = ", experts whole" if self.expert_parallel else ""
        if self.placement:
            whole += ", hot ones on several ranks"
        return f"{self.tp_rank + 1} of {self.tp}, stage {self.stage + 1} of {self.pp}{whole}"

    @property
    def placement_digest(self) -> str:
        """Digest of the experts of this rank beyond what `shard` says; empty where that says all."""
        if not self.placement:
            return ""
        held = [self.experts(len(holders), layer) for layer, holders in enumerate(self.placement)]
        return hashlib.sha256(repr(held).encode()).hexdigest()

    def equal(self, total: int) -> ShardSlice:
        size = total // self.tp
        return ShardSlice(total, self.tp_rank * size, (self.tp_rank + 1) * size)

    def experts(self, count: int, layer: int = 0) -> Sequence[int]:
        """Return the experts that this rank has of a layer with experts, whole or a part of each. If tp does
        not divide `count`, the first ranks have one more.
        """
        if not self.expert_parallel:
            return range(count)
        if self.placement:
            holders = self.placement[layer]
            return [expert for expert in range(count) if self.tp_rank in holders[expert]]
        size, more = divmod(count, self.tp)
        start = self.tp_rank * size + min(self.tp_rank, more)
        return range(start, start + size + (self.tp_rank < more))

    def holders(self, count: int, layer: int = 0) -> Sequence[Sequence[int]]:
        """Return the TP ranks that have each expert of a layer whole, ascending."""
        if self.placement:
            return self.placement[layer]
        parts = [replace(self, rank=rank).experts(count) for rank in range(self.tp)]
        return [[rank for rank, part in enumerate(parts) if expert in part] for expert in range(count)]

    def inside_expert(self, inner: int) -> ShardSlice:
        """Return this rank's slice of the intermediate rows of the experts that it has."""
        return ShardSlice.whole(inner) if self.expert_parallel else self.equal(inner)

    def kv_heads(self, kv_heads: int) -> ShardSlice:
        if kv_heads >= self.tp:
            return self.equal(kv_heads)
        first = self.tp_rank * kv_heads // self.tp
        return ShardSlice(kv_heads, first, first + 1)

    def vocabulary(self, vocab: int) -> ShardSlice:
        """Return this rank's slice of the vocabulary. All slices have one size; the last ones are padded."""
        size = -(-vocab // self.tp)
        start = self.tp_rank * size
        stop = min(vocab, start + size)
        return ShardSlice(vocab, start, stop, size - (stop - start))

    def layers(self, layers: int) -> range:
        """Return the layers of this stage. If pp does not divide them, the first stages have one more,
        because the last stage has the head.
        """
        size, more = divmod(layers, self.pp)
        start = self.stage * size + min(self.stage, more)
        return range(start, start + size + (self.stage < more))


def check_layout(
    shape: ModelShape, tp: int, pp: int, quant: Quant | None, *, expert_parallel: bool = False
) -> None:
    """Raise ParallelError if a model of this shape cannot be split over tp x pp ranks."""
    if expert_parallel:
        _check_experts(shape, tp)
    if tp * pp > MAX_RANKS:
        raise ParallelError(f"--tp {tp} and --pp {pp} make {tp * pp} ranks: at most {MAX_RANKS} can run")
    if pp > shape.layers:
        raise ParallelError(
            f"--pp {pp}: the model has {shape.layers} layers, ask for at most that many stages"
        )
    if pp > 1 and shape.has_layer_ties:
        raise ParallelError(
            f"--pp {pp}: layers of this model read keys and values of others, keys that others selected, "
            "weights that they share, or embeddings of the first stage: use --tp"
        )
    if reason := _indivisible(shape, tp, quant, expert_parallel):
        fitting = [n for n in range(1, MAX_RANKS + 1) if not _indivisible(shape, n, quant, expert_parallel)]
        raise ParallelError(f"--tp {tp}: {reason}; this model can take {_words(fitting)}")


def check_copies(
    shape: ModelShape, tp: int, pp: int, copies: int, device: str, *, expert_parallel: bool
) -> None:
    """Raise ParallelError if the ranks cannot have so many copies of hot experts in each layer."""
    if not expert_parallel:
        raise ParallelError(
            "--redundant-experts copies whole experts: ask for --expert-parallel and --tp 2 too"
        )
    assert shape.experts is not None
    if device != "cpu":
        raise ParallelError(
            "--redundant-experts follows the rows of each expert, which are counted on CPUs only: use "
            "--device cpu, or load without"
        )
    if pp > 1:
        raise ParallelError(
            "--redundant-experts follows the rows of each expert, which are counted in the first stage only: "
            "use --tp without --pp, or load without"
        )
    if copies > (most := shape.experts.count * (tp - 1)):
        raise ParallelError(
            f"--redundant-experts {copies}: {tp} ranks hold at most {most} copies of {shape.experts.count} "
            "experts, and then each has all of them: ask for fewer"
        )


def can_split(shape: ModelShape, tp: int, pp: int, quant: Quant | None) -> bool:
    if pp > 1 and shape.has_layer_ties:
        return False
    return tp * pp <= MAX_RANKS and pp <= shape.layers and not _indivisible(shape, tp, quant)


def _check_experts(shape: ModelShape, tp: int) -> None:
    if shape.experts is None:
        raise ParallelError(
            "--expert-parallel divides the experts of a mixture, and this model has none: load it without"
        )
    if tp == 1:
        raise ParallelError(
            "--expert-parallel divides experts among the ranks of --tp: ask for --tp 2, or load without"
        )
    if tp > shape.experts.count:
        raise ParallelError(
            f"--expert-parallel: {tp} ranks cannot share {shape.experts.count} experts: take a smaller --tp"
        )


def _indivisible(shape: ModelShape, tp: int, quant: Quant | None, expert_parallel: bool = False) -> str:
    """Return the first reason why `tp` ranks cannot share the model, or ""."""
    return next(
        chain(_unequal(shape, tp, expert_parallel), _cut_groups(shape, tp, quant, expert_parallel)), ""
    )


def _unequal(shape: ModelShape, tp: int, expert_parallel: bool) -> Iterator[str]:
    """Yield the parts of the model that `tp` ranks cannot share equally, as sentences."""
    experts = shape.experts
    if tp > 1 and shape.norms_all_heads:
        yield (
            "the model norms its queries over all heads together, or attention's results, of which a rank "
            "would have a part"
        )
    for heads in (shape.heads, *shape.other_heads):
        if heads % tp:
            yield f"the model's {heads} attention heads cannot be shared equally"
    if shape.kv_heads % tp and tp % shape.kv_heads:
        yield f"the model's {shape.kv_heads} KV heads can neither be shared nor copied equally"
    if shape.sliding and shape.sliding.heads and (few := shape.sliding.heads[0]) % tp and tp % few:
        yield f"the {few} KV heads of sliding-window layers can neither be shared nor copied equally"
    if shape.ffn % tp:
        yield f"the MLP's {shape.ffn} inner rows cannot be shared equally"
    if experts and not expert_parallel and experts.inner % tp:
        yield f"the {experts.inner} inner rows of each expert cannot be shared equally"
    for what, count in shape.recurrent.divisible if shape.recurrent else ():
        if count % tp:
            yield f"the {count} {what} cannot be shared equally"
    if experts and experts.shared % tp:
        yield f"the {experts.shared} inner rows of the shared expert cannot be shared equally"
    if -(-shape.vocab // tp) * (tp - 1) >= shape.vocab:
        yield f"the vocabulary has only {shape.vocab} tokens"
    for where, size in shape.other_inputs:
        if size % tp:
            yield f"the {size} inputs of {where} cannot be shared equally"


def _cut_groups(shape: ModelShape, tp: int, quant: Quant | None, expert_parallel: bool) -> Iterator[str]:
    """Yield the row-parallel linears whose parts are no whole groups of quantized inputs, then the keys whose
    parts are no whole blocks, as sentences.
    """
    if tp == 1 or quant is None:
        return
    group = shape.blocks.unit if shape.blocks and quant.is_gguf else quant.group
    for where, size in () if quant.by_output else _shared_inputs(shape, expert_parallel):
        if size // tp % group:
            yield (
                f"{quant.name} weights round groups of {group} inputs, and a part of {where} "
                f"has {size // tp}: take another --quant or --tp"
            )
    # Blocks quantized at load must not span keys and values. Blocks of a checkpoint keep their scales.
    rows = max(1, shape.kv_heads // tp) * shape.head_dim
    if quant.kind == "blocks" and shape.quant is None and rows % quant.group:
        yield (
            f"{quant.name} weights round blocks of {quant.group} outputs, and a part of the keys has {rows}: "
            "take another --quant or --tp"
        )


def _shared_inputs(shape: ModelShape, expert_parallel: bool) -> Iterator[tuple[str, int]]:
    """Yield the row-parallel linears and their inputs."""
    experts = shape.experts
    yield "attention", shape.heads * shape.head_dim if shape.latent is None else shape.latent.inner
    if experts is None or experts.layers < shape.layers:
        yield "the MLP", shape.ffn
    if experts and not expert_parallel:
        yield "an expert", experts.inner
    if experts and experts.shared:
        yield "the shared expert", experts.shared
    yield from shape.other_inputs


def _words(numbers: list[int]) -> str:
    return " or ".join([", ".join(map(str, numbers[:-1])), str(numbers[-1])] if numbers[1:] else ["1"])
