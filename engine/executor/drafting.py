"""Speculative decoding at load: rows for drafts, and the draft model or head beside its target."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from llmbox.kernels.cpu.isa import core_flops
from llmbox.kernels.dispatch import QuantUnavailable, select_ops
from llmbox.kernels.op_types import KVShape
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS

from ..checkpoint.index import weight_files
from ..config import EngineConfig
from ..core.speculation.proposer import DraftMethod, Proposer
from ..errors import DeviceError, ModelError
from ..model.decoder import Decoder
from ..model.draft_heads import Eagle3Head, MedusaHeads, MTPHead, RecurringHead
from ..model.rotary import Rotary
from ..model_config.config import ModelConfig, parse_config
from ..model_config.draft_heads import Eagle3Config, MedusaConfig, read_draft_head
from ..model_config.parallel_layout import ParallelLayout
from ..partition import ShardSlice
from ..planning.memory_model import MOST_DRAFT_ROWS, PROMPT_LOGPROB_ROWS
from ..planning.memory_plan import MemoryPlan
from ..planning.runnable import why_no_drafts
from ..runner.cpu_runner import CPUModelRunner
from ..runner.draft_head import HeadProposer, MedusaProposer
from ..runner.draft_model import DraftModel, DraftSampler, SyncDraftExecutor
from ..weights.checkpoint import Checkpoint
from ..weights.packed_cache.cache import identity
from .load_model import WeightsWanted, cache_shapes, load_part, load_weights
from .profile import GPUEngineParts

log = logging.getLogger("llmbox.engine")

_READ: Final = 12e9
"""Approximate bytes of weights that a core reads per second. A bf16 weight takes two bytes and costs two
operations per row, so `flops / _READ` rows are computed in the time that reading the weights takes."""
_ROWS_TRIED: Final = 4
"""Rows of a step with drafts over those computed while the weights are read: narrow weights take fewer
operations, and measured prices decide."""
_PRICE: Final = 0.3
"""Assumed price of as many rows as are computed while the weights are read."""
_GPU_PRICE: Final = 0.01
"""Assumed price of a row on a GPU, which computes hundreds while it reads the weights; but each reads the
keys and values of its context."""


def draft_rows(config: EngineConfig, plan: MemoryPlan, ops: Ops, *, overlaps: bool) -> tuple[int, float]:
    """Return how many rows of a step may hold draft tokens, and the price of one before it is measured, in
    times of a step; 0 rows turn speculative decoding off.

    `overlaps`: a step is launched before the previous one has returned. Raises DeviceError where drafts were
    asked for and cannot be verified.
    """
    if config.speculate == "off":
        return 0, 0.0
    beside = plan.expert_bytes > 0
    reason = why_no_drafts(plan.pp, overlaps=overlaps, row_invariant=ops.row_invariant, host_experts=beside)
    if not reason:
        most = min(MOST_DRAFT_ROWS, plan.token_budget, plan.max_running + PROMPT_LOGPROB_ROWS)
        if plan.device != "cpu":
            return most, _GPU_PRICE
        free = core_flops() / _READ
        return min(int(_ROWS_TRIED * free), most) if free >= 1 else 0, _PRICE / free
    if config.speculate == "on":
        raise DeviceError(f"speculate was asked for, but {reason}: load with --speculate auto or off")
    return 0, 0.0


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """Loaded model that drafts are for."""

    config: EngineConfig
    plan: MemoryPlan
    model: Decoder
    ops: Ops
    threads: int
    kv_dtype: torch.dtype
    progress: Callable[[int, int], None]
    device: torch.device
    runner: CPUModelRunner | None = None
    """Runner of the target; None: a GPU's, which is made later."""

    def select_ops(self) -> Ops:
        """Select kernels for weights in another format than the target's. Raises DeviceError."""
        quant = QUANTS.get(self.plan.draft_quant)
        try:
            return select_ops(
                self.device,
                self.model.dtype,
                self.kv_dtype,
                self.threads,
                quant,
                deterministic=self.config.deterministic,
            )
        except QuantUnavailable as error:
            raise DeviceError(f"draft model: {error}") from None

    def cache_shape(self, model: ModelConfig) -> KVShape:
        """Return the shape of a KV cache with as many blocks as the target's."""
        plan, dtypes = self.plan, (self.kv_dtype, self.model.dtype)
        shape, _ = cache_shapes(model, replace(plan, window=0), ParallelLayout(), *dtypes)
        return shape

    def rotary(self, model: ModelConfig) -> Rotary:
        """Return the RoPE of a draft model or head. Where its factors would change at another length than
        those of the target, they do not change.
        """
        is_fixed = model.short_context != self.model.config.short_context
        return Rotary(model, self.plan.context, self.device, self.ops.cos_sin, is_fixed=is_fixed)

    def sampler(self, ops: Ops) -> DraftSampler:
        return DraftSampler(self.model.config.vocab_size, self.device, ops)


def load_proposers(target: DraftTarget) -> tuple[list[Proposer], str]:
    """Load what proposes drafts beside n-grams; return it and, for a head, a name of its weights.

    Raises ModelError for a draft model or head that cannot propose tokens of this target, and DeviceError.
    """
    plan, config = target.plan, target.config
    if plan.draft_method is None:
        return [], ""
    if plan.draft_method == "draft_model":
        return [_load_draft_model(target)], ""
    if plan.draft_method == "mtp":
        try:
            return [_load_mtp(target)], "mtp"
        except ModelError as error:
            if config.mtp == "on":
                raise
            log.warning("the MTP layer is left out: %s", error)
            return [], ""
    assert config.draft_path is not None
    head = read_draft_head(Path(config.draft_path))
    assert head is not None
    proposer = _load_eagle3(target, head) if isinstance(head, Eagle3Config) else _load_medusa(target, head)
    log.info("%s head: %s, %s", plan.draft_method, head.directory, plan.draft_quant)
    return [proposer], "\0".join(identity(file.resolve()) for file in weight_files(head.directory))


def load_draft_parts(target: DraftTarget) -> GPUEngineParts | None:
    """Load the draft model of a target on a GPU, whose runner comes with the target's; None where none is
    asked for. Raises ModelError and DeviceError.
    """
    if target.plan.draft_method is None:
        return None
    model = _load_draft_weights(target)
    return GPUEngineParts(model, target.rotary(model.config), target.cache_shape(model.config), None, None)


def _load_draft_weights(target: DraftTarget) -> Decoder:
    config, plan, ops = target.config, target.plan, target.select_ops()
    assert config.draft_path is not None
    directory = Path(config.draft_path)
    model_config = parse_config(directory)
    wanted = WeightsWanted(directory, ops, target.model.dtype, target.device, plan.draft_quant)
    model, _ = load_weights(model_config, wanted, target.progress)
    assert isinstance(model, Decoder)
    model.clamps_ids = model_config.vocab_size < target.model.config.vocab_size
    log.info("draft model: %s, %s", directory, plan.draft_quant)
    return model


def _load_draft_model(target: DraftTarget) -> DraftModel:
    model, plan, device = _load_draft_weights(target), target.plan, target.device
    runner = CPUModelRunner(
        model,
        target.rotary(model.config),
        model.ops.make_kv_cache(target.cache_shape(model.config), device),
        target.sampler(model.ops),
        block_size=plan.block_size,
        device=device,
    )
    return DraftModel(SyncDraftExecutor(runner), plan.num_blocks, plan.block_size)


def _load_mtp(target: DraftTarget) -> HeadProposer:
    """Load the MTP layer of the target's checkpoint, with its kernels."""
    model, plan = target.model, target.plan
    directory = Path(target.config.model_path)
    wanted = WeightsWanted(directory, target.ops, model.dtype, target.device, plan.quant, part=" mtp")
    head, _ = load_part(model.config, wanted, target.progress, partial(MTPHead, model))
    log.info("MTP layer: %s", head.names.layer)
    return _follow(target, "mtp", head)


def _load_eagle3(target: DraftTarget, config: Eagle3Config) -> HeadProposer:
    model, ops = target.model, target.select_ops()
    source = _open_head(target, ops, config.directory, lambda name: name.removeprefix("model."))
    proposed_V = None
    if source.has("d2t"):
        offsets_V = source.read(source.entry("d2t"), (ShardSlice.whole(config.vocab),))
        proposed_V = offsets_V.long() + torch.arange(config.vocab)
        if not 0 <= int(proposed_V.min()) <= int(proposed_V.max()) < model.config.vocab_size:
            raise ModelError(f"{config.directory}: d2t names tokens that the target does not have")
    head = Eagle3Head(config, model, source, proposed_V)
    return _follow(target, "eagle3", head, config.taps(model.config.num_layers))


def _load_medusa(target: DraftTarget, config: MedusaConfig) -> MedusaProposer:
    ops = target.select_ops()
    heads = MedusaHeads(config, _open_head(target, ops, config.directory, config.rename))
    proposer = MedusaProposer(heads, target.sampler(ops))
    assert target.runner is not None
    target.runner.attach(proposer)
    return proposer


def _open_head(target: DraftTarget, ops: Ops, directory: Path, rename: Callable[[str], str]) -> Checkpoint:
    return Checkpoint(directory, ops, target.model.dtype, target.device, target.progress, rename=rename)


def _follow(
    target: DraftTarget, method: DraftMethod, head: RecurringHead, taps: Sequence[int] = ()
) -> HeadProposer:
    """Make the proposer of a head and have it follow the target's steps."""
    assert target.runner is not None
    cache = head.ops.make_kv_cache(target.cache_shape(head.layer), target.device)
    rotary, sampler = target.rotary(head.layer), target.sampler(head.ops)
    proposer = HeadProposer(method, head, rotary, cache, sampler, target.plan.block_size)
    target.runner.attach(proposer, taps)
    return proposer
