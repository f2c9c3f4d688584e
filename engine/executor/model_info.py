"""Facts of a loaded model for the daemon: `ModelInfo`, from its configuration and its plan."""

from pathlib import Path

from ..config import EngineConfig
from ..ipc.messages import ModelInfo
from ..model_config.config import ModelConfig
from ..model_config.encoders.pooling import EncoderVectors, PoolingConfig, read_pooling, read_vectors
from ..planning.memory_plan import MemoryPlan


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
) -> ModelInfo:
    pooling = read_pooling(Path(config.model_path), generates=model.has_head)
    width, labels = model.hidden_size, 0
    if model.is_bidirectional:
        labels = model.encoder.head.labels if model.encoder and model.encoder.head else 0
        pooling = PoolingConfig("classify" if labels else "embed", is_declared=True)
        dense = read_model_vectors(model, Path(config.model_path)).dense
        width = dense[-1].outputs if dense else width
    return ModelInfo(
        name=config.name,
        architecture=model.model_type,
        device=plan.device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        quant=plan.quant,
        backend=backend,
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
        notes=plan.notes,
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
