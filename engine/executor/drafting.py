"""Speculative decoding at load: rows for drafts, and the draft model beside its target."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from llmbox.kernels.cpu.isa import usable_levels
from llmbox.kernels.dispatch import QuantUnavailable, select_ops
from llmbox.kernels.op_types import KVShape
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS

from ..checkpoint.files import MAX_BYTES, read_json, read_regular
from ..config import EngineConfig
from ..errors import DeviceError, ModelError
from ..model.decoder import Decoder
from ..model.rotary import Rotary
from ..model_config.config import ModelConfig, parse_config
from ..planning.memory_plan import MemoryPlan
from ..planning.runnable import why_no_drafts
from ..runner.cpu_runner import CPUModelRunner
from ..runner.draft_model import DraftModel, DraftSampler
from .load_model import WeightsWanted, load_weights

log = logging.getLogger("llmbox.engine")

_READ: Final = 12e9
"""Approximate bytes of weights that a core reads per second. A bf16 weight takes two bytes and costs two
operations per row, so `flops / _READ` rows are computed in the time that reading the weights takes."""
_VOCABULARY_FILES: Final = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json")
"""Files that a vocabulary is read from, in the order of precedence."""


def draft_rows(config: EngineConfig, plan: MemoryPlan, ops: Ops, *, overlaps: bool) -> int:
    """Return how many rows of a step may hold draft tokens; 0 turns speculative decoding off.

    `overlaps`: a step is launched before the previous one has returned. Raises DeviceError where drafts were
    asked for and cannot be verified.
    """
    if config.speculate == "off":
        return 0
    reason = why_no_drafts(plan.ranks, overlaps=overlaps, row_invariant=ops.row_invariant)
    if not reason:
        return min(int(usable_levels()[0].flops / _READ), plan.token_budget)
    if config.speculate == "on":
        raise DeviceError(f"speculate was asked for, but {reason}: load with --speculate auto or off")
    return 0


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


def require_draft_for(
    target: ModelConfig, target_directory: Path, draft: ModelConfig, directory: Path
) -> None:
    """Raise ModelError if the model in `directory` cannot propose tokens of the target."""
    if draft.is_bidirectional or target.is_bidirectional:
        raise ModelError("a draft model and its target write text: models of embeddings and rankings do not")
    if draft.recurrent is not None or draft.sliding_heads is not None or draft.layer_sizes:
        raise ModelError(
            f"the draft model {directory} has recurrent layers or layers of several sizes, which a draft "
            "model must not have: choose another with --draft"
        )
    if draft.latent is not None:
        raise ModelError(
            f"the draft model {directory} has latent attention, which draft models must not have: choose "
            "another with --draft"
        )
    if (difference := _vocabulary_difference(target_directory, directory)) is not None:
        raise ModelError(
            f"the draft model {directory} has another vocabulary than {target_directory} ({difference}): a "
            "draft must be of the same family, such as a smaller size of the same model"
        )


def _vocabulary_difference(target: Path, draft: Path) -> str | None:
    """Return how the vocabularies differ, or None."""
    for name in _VOCABULARY_FILES:
        ours, theirs = (each / name for each in (target, draft))
        if not ours.is_file() or not theirs.is_file():
            continue
        if not name.endswith(".json"):
            same = read_regular(ours, MAX_BYTES) == read_regular(theirs, MAX_BYTES)
            return None if same else f"{name} differs"
        return _token_difference(_tokens(read_json(ours)), _tokens(read_json(theirs)))
    return "they have no tokenizer file in common"


def _tokens(vocabulary: dict[str, Any]) -> dict[int, Any]:
    """Return what each id stands for. Raises ModelError."""
    try:
        if "config" in vocabulary:  # tekken.json
            return {each["rank"]: each["token_bytes"] for each in vocabulary["vocab"]}
        tokens = vocabulary.get("model", {}).get("vocab", vocabulary)
        pairs = enumerate(each[0] for each in tokens) if isinstance(tokens, list) else None
        found = dict(pairs or ((number, text) for text, number in tokens.items()))
        return found | {each["id"]: each["content"] for each in vocabulary.get("added_tokens", ())}
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ModelError(f"the vocabulary of the draft model cannot be compared: {error!r}") from None


def _token_difference(ours: dict[int, Any], theirs: dict[int, Any]) -> str | None:
    common = ours.keys() & theirs.keys()
    if len(common) < max(len(ours), len(theirs)) * 0.99:
        return f"{len(ours)} and {len(theirs)} tokens"
    different = [number for number in common if ours[number] != theirs[number]]
    if not different:
        return None
    first = min(different)
    return f"{len(different)} tokens differ, id {first} is {ours[first]!r} and {theirs[first]!r}"
