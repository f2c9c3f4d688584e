"""Load weights through the packed-weight cache: map them if cached, else pack them and store them there."""

import logging
from pathlib import Path

from llmbox.kernels.quant_formats import QUANTS

from ..model.registry import build_model
from ..model_config.config import ModelConfig
from ..weights.packed_cache.cache import PackedWeightCache
from ..weights.packed_cache.file import DamagedPackedFile
from ..weights.packed_cache.key import PackKey
from ..weights.packed_cache.source import PackedWeightSource, PackedWeightWriter
from .load_model import Loaded, Progress, WeightsWanted, delta_or_none, from_checkpoint, memory_in_use

log = logging.getLogger(__name__)


def load_repacked(
    config: ModelConfig, wanted: WeightsWanted, progress: Progress, place: tuple[Path, int]
) -> Loaded:
    """Load from the cache in `place` (folder, maximum bytes), or fill it. Raises ModelError."""
    packing = wanted.ops.packing
    assert packing is not None
    cache = PackedWeightCache(*place)
    key = PackKey(
        directory=wanted.directory,
        dtype=str(wanted.dtype),
        quant=wanted.quant,
        layout=packing.layout,
        shard=wanted.rank.layout.shard,
    )
    found = _from_cache(config, wanted, cache, key)
    if found is not None:
        return found
    keeper = PackedWeightWriter(cache, key, packing)
    loaded = from_checkpoint(config, wanted, progress, keeper)
    keeper.start()
    return loaded


def _from_cache(
    config: ModelConfig, wanted: WeightsWanted, cache: PackedWeightCache, key: PackKey
) -> Loaded | None:
    """Return the cached model; None when there is none. A damaged file is removed."""
    before = memory_in_use(wanted.device)
    try:
        file = cache.find(key)
        if file is None:
            return None
        source = PackedWeightSource(wanted.ops, wanted.dtype, file, wanted.rank)
        model = build_model(config, source, QUANTS.get(wanted.quant))
    except DamagedPackedFile as damage:
        cache.discard(key, str(damage))
        return None
    except OSError as error:
        log.warning("packed weights cannot be taken up: %s", error)
        return None
    anonymous = delta_or_none(before, memory_in_use(wanted.device))
    return model, None if anonymous is None else anonymous + source.mapped
