"""Load a model's weights, from the packed-weight cache on disk if cached, else from the checkpoint; facts of
it for the daemon.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from llmbox.kernels.op_types import KVShape
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.recurrent import StateShape

from ..checkpoint.index import list_tensors
from ..config import EngineConfig
from ..distributed.communicator import SINGLE, TensorParallel
from ..errors import ModelError
from ..gguf.folder import gguf_of
from ..hardware.proc import trim_heap
from ..ipc.messages import ModelInfo
from ..model.decoder import Decoder
from ..model.encoder import Encoder
from ..model.registry import build_model
from ..model_config.config import ModelConfig
from ..model_config.encoders.config import EncoderVectors, PoolingConfig, read_pooling, read_vectors
from ..model_config.expected_tensors import check_weights
from ..model_config.parallel_layout import ParallelLayout
from ..model_config.recurrent.config import RecurrentConfig
from ..planning.memory_plan import MemoryPlan
from ..weights.checkpoint import Checkpoint
from ..weights.gguf_source import GgufSource
from ..weights.packed_cache.cache import PackedWeightCache, PackKey, read_cache_variables
from ..weights.packed_cache.file import DamagedPackedFile
from ..weights.packed_cache.source import PackedWeightSource, PackedWeightWriter
from ..weights.source import WeightObserver, WeightSource

_STATUS = Path("/proc/self/status")


def memory_in_use(device: torch.device) -> int | None:
    """Return bytes of tensors on a GPU, or of this process's anonymous pages on a CPU; None where unknown.

    On a CPU the allocator first returns its freed buffers (files read, weights before packing).
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    trim_heap()
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("RssAnon:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def delta_or_none(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else max(0, after - before)


Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    directory: Path
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quant: str
    rank: TensorParallel = SINGLE
    part: str = ""
    """Name of a part of the checkpoint that is packed on its own; empty: the whole model."""


M = TypeVar("M")
Loaded = tuple[M, int | None]
"""Model, and the bytes of memory that it took (None where unknown)."""
Build = Callable[[WeightSource], M]


def load_weights(config: ModelConfig, wanted: WeightsWanted, progress: Progress) -> Loaded[Decoder | Encoder]:
    """Load this rank's shard of the weights. Raises ModelError."""
    return load_part(config, wanted, progress, model_builder(config, wanted))


def model_builder(config: ModelConfig, wanted: WeightsWanted) -> Build[Decoder | Encoder]:
    return lambda source: build_model(config, source, QUANTS.get(wanted.quant))


def load_part(config: ModelConfig, wanted: WeightsWanted, progress: Progress, build: Build[M]) -> Loaded[M]:
    """Load what `build` makes of a checkpoint's weights. Raises ModelError."""
    place = read_cache_variables()
    if wanted.ops.packing is None or place is None:
        return from_checkpoint(config, wanted, progress, build)

    return load_repacked(config, wanted, progress, build, place)


def from_checkpoint(
    config: ModelConfig,
    wanted: WeightsWanted,
    progress: Progress,
    build: Build[M],
    keeper: WeightObserver | None = None,
) -> Loaded[M]:
    """Load the weights from the checkpoint; `keeper` gets every packed weight. Raises ModelError."""
    before = memory_in_use(wanted.device)
    options = (wanted.ops, wanted.dtype, wanted.device, progress, keeper, wanted.rank)
    file = gguf_of(wanted.directory)
    rename = None if config.encoder is None else config.encoder.rename
    source: WeightSource = (
        Checkpoint(wanted.directory, *options, rename) if file is None else GgufSource(file, config, *options)
    )
    try:
        model = build(source)
    except ModelError:
        if file is None and not wanted.part:  # with the words of `fit`, where it finds the same
            check_weights(str(wanted.directory), config, list_tensors(wanted.directory))
        raise
    return model, delta_or_none(before, memory_in_use(wanted.device))


log = logging.getLogger(__name__)


def load_repacked(
    config: ModelConfig,
    wanted: WeightsWanted,
    progress: Progress,
    build: Build[M],
    place: tuple[Path, int],
) -> Loaded[M]:
    """Load from the cache in `place` (folder, maximum bytes), or fill it. Raises ModelError."""
    packing = wanted.ops.packing
    assert packing is not None
    cache = PackedWeightCache(*place)
    key = PackKey(
        directory=wanted.directory,
        dtype=str(wanted.dtype),
        quant=wanted.quant,
        layout=packing.layout,
        shard=wanted.rank.layout.shard + wanted.part,
        placement=wanted.rank.layout.placement_digest,
    )
    found = _from_cache(wanted, build, cache, key)
    if found is not None:
        return found
    keeper = PackedWeightWriter(cache, key, packing)
    loaded = from_checkpoint(config, wanted, progress, build, keeper)
    keeper.start()
    return loaded


def _from_cache(
    wanted: WeightsWanted, build: Build[M], cache: PackedWeightCache, key: PackKey
) -> Loaded[M] | None:
    """Return the cached model; None when there is none. A damaged file is removed."""
    before = memory_in_use(wanted.device)
    try:
        file = cache.find(key)
        if file is None:
            return None
        source = PackedWeightSource(wanted.ops, wanted.dtype, file, wanted.rank)
        model = build(source)
    except DamagedPackedFile as damage:
        cache.discard(key, str(damage))
        return None
    except OSError as error:
        log.warning("packed weights cannot be reused: %s", error)
        return None
    anonymous = delta_or_none(before, memory_in_use(wanted.device))
    return model, None if anonymous is None else anonymous + source.mapped


def cache_shapes(
    model: ModelConfig,
    plan: MemoryPlan,
    layout: ParallelLayout,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[KVShape, KVShape | None]:
    """Return the shape of the KV cache of a stage, and that of its sliding-window layers, where they have
    blocks of their own or heads of another width.
    """
    stage = layout.layers(model.num_layers)
    whole = KVShape(
        num_layers=max(1, model.layers_with(stage, state=False)),
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        num_kv_heads=layout.kv_heads(model.num_kv_heads).size,
        head_dim=model.head_dim,
        dtype=kv_dtype,
        compute_dtype=dtype,
        latent=0 if model.latent is None else model.latent.kv_rank,
    )
    heads, sliding = model.sliding_heads, model.sliding_layers(stage)
    if not plan.window and heads is None:
        return whole, None
    count, width = heads or (model.num_kv_heads, model.head_dim)
    windowed = replace(
        whole,
        num_layers=max(1, sliding),
        num_kv_heads=layout.kv_heads(count).size,
        head_dim=width,
        num_blocks=plan.window_blocks if plan.window else plan.num_blocks,
        is_windowed=plan.window > 0,
    )
    return replace(whole, num_layers=max(1, whole.num_layers - sliding)), windowed


def state_shape(recurrent: RecurrentConfig, layers: int, plan: MemoryPlan, tp: int) -> StateShape:
    return StateShape(
        num_layers=layers,
        num_slots=plan.state_slots,
        channels=recurrent.channels // tp,
        conv_width=recurrent.conv_width,
        heads=recurrent.heads // tp,
        key_dim=recurrent.key_dim,
        value_dim=recurrent.value_dim,
    )


def read_model_vectors(model: ModelConfig, directory: Path) -> EncoderVectors:
    if model.encoder is not None and model.encoder.head is not None:
        return EncoderVectors("cls")
    return read_vectors(directory, model.hidden_size)


def model_info(
    config: EngineConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    backend: str,
    load_seconds: float,
    measured: int | None,
    worker_pids: list[int],
    *,
    problem: str = "",
) -> ModelInfo:
    pooling, width, labels = _outputs(model, Path(config.model_path))
    return ModelInfo(
        name=config.name,
        architecture=model.model_type,
        device=plan.device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        quant=plan.quant,
        backend=backend,
        kernels_problem=problem,
        context_window=plan.context,
        vocab_size=model.vocab_size,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        weights_bytes=plan.weights_bytes * plan.ranks,
        kv_bytes=plan.kv_bytes * plan.ranks,
        kv_bytes_per_token=plan.kv_bytes_per_token * plan.ranks,
        workspace_bytes=(plan.workspace_bytes + plan.buffer_bytes + plan.prefill_bytes) * plan.ranks,
        max_running=plan.max_running,
        max_concurrency=plan.max_concurrency,
        load_seconds=load_seconds,
        measured_weights_bytes=measured,
        tp=plan.tp,
        pp=plan.pp,
        expert_parallel=plan.expert_parallel,
        redundant_experts=plan.redundant_experts,
        state_slots=plan.state_slots,
        state_bytes=plan.state_bytes * plan.ranks,
        gpus=tuple(plan.gpus),
        worker_pids=tuple(worker_pids),
        notes=(*plan.notes, *((f"slower kernels run: {problem}",) if problem else ())),
        hidden_size=width,
        num_labels=labels,
        pooling=pooling.pooling,
        pooling_problem=pooling.problem,
        generates=model.has_head and not pooling.is_declared,
        image_problem=plan.image_problem,
        image_token_id=-1 if model.vision is None else model.vision.image_token_id,
        vision_bytes=plan.vision_bytes,
        image_cache_bytes=plan.image_cache_bytes,
        disaggregate=config.disaggregate,
        token_budget=plan.token_budget,
        mixed_budget=plan.mixed_budget,
        prefill_bytes=plan.prefill_bytes,
        expert_bytes=plan.expert_bytes,
        expert_quant=plan.expert_quant,
        host_bytes=plan.expert_bytes + plan.host_bytes,
    )


def _outputs(model: ModelConfig, directory: Path) -> tuple[PoolingConfig, int, int]:
    """Return what a model gives besides tokens: how rows are pooled, the width of its vectors, and the number
    of its classes.
    """
    if not model.is_bidirectional:
        return read_pooling(directory, generates=model.has_head), model.hidden_size, 0
    labels = model.encoder.head.labels if model.encoder and model.encoder.head else 0
    dense = read_model_vectors(model, directory).dense
    pooling = PoolingConfig("classify" if labels else "embed", is_declared=True)
    return pooling, dense[-1].outputs if dense else model.hidden_size, labels
