"""Speculative decoding at load: rows for drafts, and the draft model or head beside its target."""

import logging
from collections.abc import Callable
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
from ..checkpoint.safetensors import ShardSlice
from ..config import EngineConfig
from ..core.speculation.proposer import DraftMethod, Proposer
from ..errors import DeviceError, ModelError
from ..model.decoder import Decoder
from ..model.draft_heads import DraftHead, Eagle3Head, MedusaHeads, MTPHead
from ..model.rotary import Rotary
from ..model_config.config import ModelConfig, parse_config
from ..model_config.draft_heads import Eagle3Config, MedusaConfig, read_draft_head
from ..model_config.parallel_layout import ParallelLayout
from ..planning.memory_model import MOST_DRAFT_ROWS, PROMPT_LOGPROB_ROWS
from ..planning.memory_plan import MemoryPlan
from ..planning.runnable import why_no_drafts
from ..runner.block_memory import ModelCaches
from ..runner.cpu_runner import CPUModelRunner
from ..runner.draft_head import HeadProposer, HeadRunner, SyncHeadExecutor
from ..runner.draft_model import DraftModel, DraftSampler, SyncDraftExecutor
from ..weights.checkpoint import Checkpoint
from ..weights.packed_cache.cache import identity
from .load_model import WeightsWanted, cache_shapes, load_part, load_weights
from .profile import RunnerParts

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
        raise DeviceError(f"speculate was requested, but {reason}: load with --speculate auto or off")
    return 0, 0.0


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """Loaded target model, for which drafts are proposed."""

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


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """Draft head of a target."""

    method: DraftMethod
    model: DraftHead
    name: str
    """Name of its weights."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose inputs it reads; empty: it reads the last hidden states."""


def load_proposers(target: DraftTarget) -> tuple[list[Proposer], str]:
    """Load what proposes drafts beside n-grams; return it and, for a head, a name of its weights.

    Raises ModelError for a draft model or head that cannot propose tokens of this target, and DeviceError.
    """
    plan, device, runner = target.plan, target.device, target.runner
    if plan.draft_method == "draft_model":
        return [_load_draft_model(target)], ""
    loaded = _load_head(target)
    if loaded is None:
        return [], ""
    assert runner is not None
    head, shape = loaded.model, _head_cache(target, loaded.model)
    cache = None if shape is None else head.ops.make_kv_cache(shape, device)
    own = HeadRunner(head, target.rotary(head.config), cache, target.sampler(head.ops), plan.block_size)
    proposer = HeadProposer(loaded.method, head, SyncHeadExecutor(own), plan.block_size)
    runner.attach(proposer, cache, loaded.taps)
    return [proposer], loaded.name


def load_draft_parts(target: DraftTarget) -> tuple[RunnerParts | None, str]:
    """Load the draft model or head of a target on a GPU, whose runner comes with the target's; None where
    there is none. Returns also a name of a head's weights. Raises ModelError and DeviceError.
    """
    if target.plan.draft_method == "draft_model":
        model = _load_draft_weights(target)
        cache = target.cache_shape(model.config)
        return RunnerParts(model, target.rotary(model.config), cache), ""
    loaded = _load_head(target)
    if loaded is None:
        return None, ""
    head, shape = loaded.model, _head_cache(target, loaded.model)
    rows, _ = draft_rows(target.config, target.plan, target.ops, overlaps=True)
    parts = RunnerParts(head, target.rotary(head.config), shape, draft_rows=rows)
    return replace(parts, method=loaded.method, taps=loaded.taps), loaded.name


def _head_cache(target: DraftTarget, head: DraftHead) -> KVShape | None:
    return target.cache_shape(head.config) if head.has_keys else None


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
        ModelCaches(model.ops, model.ops.make_kv_cache(target.cache_shape(model.config), device)),
        target.sampler(model.ops),
        block_size=plan.block_size,
        device=device,
    )
    return DraftModel(SyncDraftExecutor(runner), plan.num_blocks, plan.block_size)


def _load_head(target: DraftTarget) -> LoadedHead | None:
    """Load the head that is planned, if there is one; no damaged MTP layer, unless it is asked for."""
    plan, config = target.plan, target.config
    if plan.draft_method is None:
        return None
    if plan.draft_method == "mtp":
        try:
            return _load_mtp(target)
        except ModelError as error:
            if config.mtp == "on":
                raise
            log.warning("the MTP layer is left out: %s", error)
            return None
    assert config.draft_path is not None
    head = read_draft_head(Path(config.draft_path))
    assert head is not None
    log.info("%s head: %s, %s", plan.draft_method, head.directory, plan.draft_quant)
    name = "\0".join(identity(file.resolve()) for file in weight_files(head.directory))
    ops = target.select_ops()
    if isinstance(head, MedusaConfig):
        source = _open_head(target, ops, head.directory, head.rename)
        return LoadedHead("medusa", MedusaHeads(head, target.model, source), name)
    taps = head.taps(target.model.config.num_layers)
    return LoadedHead("eagle3", _load_eagle3(target, head, ops), name, taps)


def _load_mtp(target: DraftTarget) -> LoadedHead:
    """Load the MTP layer of the target's checkpoint, with its kernels."""
    model, plan = target.model, target.plan
    directory = Path(target.config.model_path)
    wanted = WeightsWanted(directory, target.ops, model.dtype, target.device, plan.quant, part=" mtp")
    head, _ = load_part(model.config, wanted, target.progress, partial(MTPHead, model))
    log.info("MTP layer: %s", head.names.layer)
    return LoadedHead("mtp", head, "mtp")


def _load_eagle3(target: DraftTarget, config: Eagle3Config, ops: Ops) -> Eagle3Head:
    source = _open_head(target, ops, config.directory, lambda name: name.removeprefix("model."))
    proposed_V = None
    if source.has("d2t"):
        offsets_V = source.read(source.entry("d2t"), (ShardSlice.whole(config.vocab),))
        proposed_V = offsets_V.long().cpu() + torch.arange(config.vocab)
        if not 0 <= int(proposed_V.min()) <= int(proposed_V.max()) < target.model.config.vocab_size:
            raise ModelError(f"{config.directory}: d2t names tokens that the target does not have")
        proposed_V = proposed_V.to(target.device)
    return Eagle3Head(config, target.model, source, proposed_V)


def _open_head(target: DraftTarget, ops: Ops, directory: Path, rename: Callable[[str], str]) -> Checkpoint:
    return Checkpoint(directory, ops, target.model.dtype, target.device, target.progress, rename=rename)
