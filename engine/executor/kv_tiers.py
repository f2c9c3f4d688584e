"""Tiers behind an engine's prefix cache: opened beside the loaded model, or left out with the reason."""

import hashlib
import logging
from functools import cache, partial
from pathlib import Path

import torch

from ..config import EngineConfig
from ..core.kv_cache.block_pool import BlockMemory
from ..core.kv_cache.host_tier import HostTier
from ..core.kv_cache.manager import KVCacheManager
from ..core.kv_cache.tiers import KVTiers
from ..core.speculation.answer_files import AnswerFiles
from ..errors import ModelError
from ..hardware.machine import show_bytes
from ..kv_store import usage
from ..kv_store.block_file import MODEL_BYTES, BlockKind, HandoverSegment
from ..kv_store.folder import KVFolder, KVFolderUnusable
from ..kv_store.store import BlockStore
from ..kv_store.store_threads import BUFFER_BYTES
from ..model.rotary import Rotary
from ..planning.memory_plan import MemoryPlan
from ..runner.block_memory import DeviceBlockMemory
from ..weights.packed_cache.cache import PackKey
from .rank_blocks import RankBlockMemory
from .rank_engine import RankEngine

log = logging.getLogger("llmbox.engine")

LEAST_BUFFER_BYTES = 4 << 20
"""Bytes of each direction's buffers where the plan has none to spare."""
_CODE = ("engine/model", "engine/model_config", "engine/vision", "engine/weights", "kernels")
"""Folders whose code decides the bits of keys and values, next to the kernels' own digest."""
_PROBED = (1, 1000)
"""Positions at which the tables of RoPE are compared: `dynamic` frequencies follow the served context."""


def open_tiers(
    config: EngineConfig,
    plan: MemoryPlan,
    computed: RankEngine,
    memory: DeviceBlockMemory | RankBlockMemory,
    kv_cache: KVCacheManager,
) -> AnswerFiles | None:
    """Set the tiers behind `kv_cache`, and return the files for answers beside those on disk. Where the disk
    is left out, the log has the reason.
    """
    if not config.prefix_cache:
        return None
    host = open_host_tier(plan, memory)
    store, answers = _open_store(config, plan, computed, memory)
    if store is not None or host is not None:
        kv_cache.tiers = KVTiers(store, memory, kv_cache, host=host)
    return answers


def open_host_tier(plan: MemoryPlan, memory: BlockMemory) -> HostTier | None:
    """Return the tier for blocks that a GPU evicts; None where the plan has no memory for it. Blocks of each
    kind get the share that they have of the device's memory.
    """
    pools: dict[BlockKind, int] = {"kv": plan.num_blocks, "window": plan.window_blocks}
    pools["state"] = plan.state_slots
    device = sum(pools[kind] * size for kind, size in memory.sizes.items())
    if not plan.host_bytes or not device:
        return None
    share = plan.host_bytes / device
    log.info("KV blocks that the GPU evicts: at most %s of main memory", show_bytes(plan.host_bytes))
    return HostTier(memory, {kind: int(pools[kind] * share) for kind in memory.sizes})


def _open_store(
    config: EngineConfig,
    plan: MemoryPlan,
    computed: RankEngine,
    memory: DeviceBlockMemory | RankBlockMemory,
) -> tuple[BlockStore | None, AnswerFiles | None]:
    place = usage.read_variables()
    if place is None:
        return None, None
    try:
        folder = KVFolder(*place)
        folder.open()
        key = _pack_key(config, plan, computed)
        about = {
            "model": config.model_path,
            "format": f"{plan.dtype if plan.quant == 'none' else plan.quant}, KV {plan.kv_dtype}",
            "origins": [[origin.path, origin.size, origin.mtime_ns] for origin in key.origins()],
        }
        digest = fingerprint(key, plan, computed.rotary, memory)
        limit = max(LEAST_BUFFER_BYTES, plan.buffer_bytes // 2) if plan.device == "cpu" else BUFFER_BYTES
        store = BlockStore(
            folder,
            digest,
            about,
            queue_bytes=limit,
            make_buffer=memory.make_buffer,
            checksums=memory.checksums,
        )
        answers = AnswerFiles(folder, digest, about, partial(_count_damage, store))
    except (KVFolderUnusable, ModelError, OSError) as error:
        log.warning("the KV cache on disk is left out: %s", error)
        return None, None
    log.info("KV cache on disk: at most %s for all models, in %s", show_bytes(place[1]), folder.root)
    return store, answers


def make_segment(
    handle: int, config: EngineConfig, plan: MemoryPlan, computed: RankEngine, memory: DeviceBlockMemory
) -> HandoverSegment:
    """Map the hand-over segment of a pair. Raises ModelError and OSError."""
    digest = fingerprint(_pack_key(config, plan, computed), plan, computed.rotary, memory)
    return HandoverSegment(handle, max(memory.sizes.values()), digest, memory.checksums)


def _pack_key(config: EngineConfig, plan: MemoryPlan, computed: RankEngine) -> PackKey:
    layout = "\0".join(computed.kernels)
    return PackKey(directory=Path(config.model_path), dtype=plan.dtype, quant=plan.quant, layout=layout)


def _count_damage(store: BlockStore) -> None:
    store.counters.damaged += 1


def fingerprint(
    key: PackKey, plan: MemoryPlan, rotary: Rotary, memory: DeviceBlockMemory | RankBlockMemory
) -> bytes:
    """Return the digest of all that the bytes of a block depend on, but its tokens. Raises ModelError and
    OSError.
    """
    digest = hashlib.sha256()
    shapes: tuple[object, ...] = plan.kv_dtype, plan.block_size, plan.window, sorted(memory.sizes.items())
    if plan.ranks > 1:  # the parts of a block lie one behind the other
        shapes = (*shapes, plan.tp, plan.pp, *(["experts"] if plan.expert_parallel else []))
    for part in (key.digest(), code_digest(), *shapes):
        digest.update(f"{part}\0".encode())
    positions = torch.tensor([min(position, plan.context - 1) for position in _PROBED], device=memory.device)
    for is_long in (False, True) if rotary.short_context else (False,):
        for table in rotary.rows(positions, is_long):
            digest.update(bytes(table.float().cpu().contiguous().view(torch.uint8).flatten().tolist()))
    return digest.digest()[:MODEL_BYTES]


@cache
def code_digest() -> str:
    """Return a digest of the sources in `_CODE`."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (root / folder).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
