"""Speculative decoding at load: rows for drafts, and the draft model beside its target."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from llmbox.kernels.cpu.isa import usable_levels
from llmbox.kernels.dispatch import QuantUnavailable, select_ops
from llmbox.kernels.op_types import KVShape
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS

from ..config import EngineConfig
from ..errors import DeviceError
from ..model.decoder import Decoder
from ..model.rotary import Rotary
from ..model_config.config import ModelConfig, parse_config
from ..planning.draft_compatibility import require_draft_for
from ..planning.memory_model import PROMPT_LOGPROB_ROWS
from ..planning.memory_plan import MemoryPlan
from ..planning.runnable import why_no_drafts
from ..runner.cpu_runner import CPUModelRunner
from ..runner.draft_model import DraftModel, DraftSampler
from .load_model import WeightsWanted, load_weights

log = logging.getLogger("llmbox.engine")

_READ: Final = 12e9
"""Approximate bytes of weights that a core reads per second. A bf16 weight takes two bytes and costs two
operations per row, so `flops / _READ` rows are computed in the time that reading the weights takes."""
_MOST_ROWS: Final = 64
_ROWS_TRIED: Final = 4
"""Rows of a step with drafts over those computed while the weights are read: narrow weights take fewer
operations, and measured prices decide."""
_PRICE: Final = 0.3
"""Assumed price of as many rows as are computed while the weights are read."""


def draft_rows(config: EngineConfig, plan: MemoryPlan, ops: Ops, *, overlaps: bool) -> tuple[int, float]:
    """Return how many rows of a step may hold draft tokens, and the price of one before it is measured, in
    times of a step; 0 rows turn speculative decoding off.

    `overlaps`: a step is launched before the previous one has returned. Raises DeviceError where drafts were
    asked for and cannot be verified.
    """
    if config.speculate == "off":
        return 0, 0.0
    reason = why_no_drafts(plan.ranks, overlaps=overlaps, row_invariant=ops.row_invariant)
    if not reason:
        free = usable_levels()[0].flops / _READ
        most = min(_MOST_ROWS, plan.token_budget, plan.max_running + PROMPT_LOGPROB_ROWS)
        return min(int(_ROWS_TRIED * free), most) if free >= 1 else 0, _PRICE / free
    if config.speculate == "on":
        raise DeviceError(f"speculate was asked for, but {reason}: load with --speculate auto or off")
    return 0, 0.0


def load_draft_model(
    config: EngineConfig,
    plan: MemoryPlan,
    target: ModelConfig,
    threads: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    progress: Callable[[int, int], None],
) -> DraftModel:
    """Load the draft model of `config.draft_path`. `dtypes`: of activations and of keys and values.

    Raises ModelError for one that cannot propose tokens of this target, and DeviceError.
    """
    assert config.draft_path is not None
    directory, device = Path(config.draft_path), torch.device("cpu")
    model_config = parse_config(directory)
    require_draft_for(target, Path(config.model_path), model_config, directory)
    dtype, kv_dtype = dtypes
    try:
        ops = select_ops(device, dtype, kv_dtype, threads, QUANTS.get(plan.draft_quant))
    except QuantUnavailable as error:
        raise DeviceError(f"draft model: {error}") from None
    wanted = WeightsWanted(directory, ops, dtype, device, plan.draft_quant)
    model, _ = load_weights(model_config, wanted, progress)
    assert isinstance(model, Decoder)
    shape = KVShape(
        num_layers=model_config.num_layers,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=kv_dtype,
        compute_dtype=dtype,
    )
    runner = CPUModelRunner(
        model,
        Rotary(model_config, plan.context, device),
        ops.make_kv_cache(shape, device),
        DraftSampler(target.vocab_size, device, ops),
        block_size=plan.block_size,
        device=device,
    )
    log.info("draft model: %s, %s", directory, plan.draft_quant)
    return DraftModel(runner, plan.num_blocks, plan.block_size)
