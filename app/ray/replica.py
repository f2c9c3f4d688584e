"""Replica of the deployment: one engine under its supervisor."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from llmbox import __version__
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import AddRequest, ModelInfo, RequestOutput, Vocabulary

from ..engines.engine_process import SupervisorOptions
from ..engines.supervisor import Supervisor
from ..errors import ApiError

_NO_LIMIT: Final = 1 << 30
"""Fronts have the queue's limit, and Serve has `max_ongoing_requests`."""
_SAMPLE: Final = 64 << 10
"""Bytes of each end of a file of weights that are hashed."""


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a replica, by which a front checks requests."""

    info: ModelInfo
    fingerprint: str


def fingerprint(config: EngineConfig, info: ModelInfo) -> str:
    """Hash that is equal for replicas with the same version, files and settings, whatever their memory."""
    facts: list[Any] = [__version__, info.architecture, info.dtype, info.kv_dtype, info.quant, info.backend]
    facts += [info.context_window, info.vocab_size, info.block_size, config.name, info.weights_bytes]
    digest = hashlib.sha256(msgspec.json.encode(facts))
    path = Path(config.model_path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix in {".json", ".safetensors", ".gguf"} and file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name if path.is_dir() else ''} {size}".encode())
            with file.open("rb") as data:
                digest.update(data.read(_SAMPLE))
                data.seek(max(0, size - _SAMPLE))
                digest.update(data.read(_SAMPLE))
    return digest.hexdigest()[:16]


class EngineReplica:
    """Engine of a replica. Ray Serve makes it, asks for its health and ends it."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, config: EngineConfig, options: SupervisorOptions | None = None
    ) -> None:
        options = options or SupervisorOptions(queue_limit=_NO_LIMIT, queue_per_key=_NO_LIMIT)
        self.supervisor = Supervisor(config, options)
        try:
            await self.supervisor.start()
        except ApiError as error:
            raise RuntimeError(f"cannot load {config.name}: {error.message}") from None
        assert self.supervisor.info is not None
        self.facts_of_model = ReplicaFacts(
            info=self.supervisor.info, fingerprint=fingerprint(config, self.supervisor.info)
        )

    async def facts(self) -> bytes:
        return msgspec.msgpack.encode(self.facts_of_model)

    async def set_vocabulary(self, data: bytes, sizes: list[int], special: list[int]) -> None:
        self.supervisor.vocabulary = Vocabulary(data=data, sizes=sizes, special=special)

    async def generate(self, message: bytes, hashes: list[bytes], wanted: str) -> AsyncIterator[bytes]:
        """Answer an encoded `AddRequest` with encoded lists of `RequestOutput`; closing it aborts it."""
        del hashes  # the router's
        request = msgspec.msgpack.decode(message, type=AddRequest)
        if wanted != self.facts_of_model.fingerprint:
            own = self.facts_of_model.fingerprint
            yield _refusal(
                request.request_id,
                "replica_mismatch",
                f"The replicas run another model or version ({own}) than this front ({wanted}). "
                "Deploy it again: llmbox ray deploy.",
            )
            return
        if request.params.needs_vocabulary and self.supervisor.vocabulary is None:
            yield _refusal(request.request_id, NEEDS_VOCABULARY, "")
            return
        try:
            stream = self.supervisor.submit(request)
        except ApiError as error:
            yield _refusal(request.request_id, error.code or "engine_failed", error.message)
            return
        with stream:
            async for output in stream:
                yield msgspec.msgpack.encode(output)

    async def check_health(self) -> None:
        """Raise for an engine that was given up: Serve then replaces the replica."""
        if self.supervisor.state == "failed":
            raise RuntimeError(self.supervisor.problem)

    def record_replica_metadata(self) -> dict[str, str]:
        return {"fingerprint": self.facts_of_model.fingerprint, "version": __version__}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Share of the KV cache that open requests hold, for `scaling.scale_by_load`."""
        stats = self.supervisor.stats
        return {"kv_used": stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0}

    async def pids(self) -> list[int]:
        """Pids of the replica's engine."""
        return self.supervisor.pids


NEEDS_VOCABULARY: Final = "needs_vocabulary"
"""Code of a request with a grammar that came to a replica before the vocabulary did."""


def _refusal(request_id: str, code: str, message: str) -> bytes:
    return msgspec.msgpack.encode(
        RequestOutput(request_id=request_id, finish_reason="error", error_code=code, error_message=message)
    )
