"""A load that looks for packed weights first, and keeps what it had to pack."""

import logging
from pathlib import Path

from llmbox.kernels.quant import QUANTS

from ..footprint import grown, memory_in_use
from ..load_weights import Loaded, Progress, WeightsWanted, from_checkpoint
from ..model_config import ModelConfig
from ..models import build_model
from .cache import RepackedCache
from .file import Damaged
from .key import PackKey
from .source import Keeper, RepackedSource

log = logging.getLogger(__name__)


def load_repacked(
    config: ModelConfig, wanted: WeightsWanted, progress: Progress, place: tuple[Path, int]
) -> Loaded:
    """Raises ModelError."""
    packing = wanted.ops.packing
    assert packing is not None
    cache = RepackedCache(*place)
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
    keeper = Keeper(cache, key, packing)
    loaded = from_checkpoint(config, wanted, progress, keeper)
    keeper.start()
    return loaded


def _from_cache(
    config: ModelConfig, wanted: WeightsWanted, cache: RepackedCache, key: PackKey
) -> Loaded | None:
    """None when they are not there, or not what they should be: then the file is gone."""
    before = memory_in_use(wanted.device)
    try:
        file = cache.find(key)
        if file is None:
            return None
        source = RepackedSource(wanted.ops, wanted.dtype, file, wanted.rank)
        model = build_model(config, source, QUANTS.get(wanted.quant))
    except Damaged as damage:
        cache.discard(key, str(damage))
        return None
    except OSError as error:
        log.warning("packed weights cannot be taken up: %s", error)
        return None
    anonymous = grown(before, memory_in_use(wanted.device))
    return model, None if anonymous is None else anonymous + source.mapped
