"""Adapters in the slots of one rank's model, as its runner loads them before a step."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from llmbox.kernels.lora import MAX_SLOTS

from ..checkpoint.adapter import read_adapter
from ..core.step import ScheduledRequest
from ..distributed.communicator import TensorParallel
from ..errors import ModelError
from .adapters import AdapterLayers

log = logging.getLogger("llmbox.engine")


class LoadedAdapters:
    """Slots that have an adapter, and why some have none. All ranks load the same before the same step."""

    def __init__(
        self, layers: AdapterLayers | None, dtype: torch.dtype, rank: TensorParallel, limit: int = 0
    ) -> None:
        """`limit`: most bytes of adapters, up to which memory for the next one is kept ready."""
        self._layers, self._dtype, self._rank, self._limit = layers, dtype, rank, limit
        self._slots: dict[int, int] = {}
        """Bytes of each slot's adapter."""
        self._broken: dict[int, str] = {}
        """Reason why the adapter of a slot could not be loaded."""

    def __bool__(self) -> bool:
        return bool(self._slots)

    def load(self, loads: Sequence[tuple[int, str]]) -> object:
        """Load each (slot, folder) in place of what the slot held; an empty folder empties it.

        Where a rank cannot, the slot stays empty on all ranks, and its requests fail.
        """
        for slot, folder in loads:
            assert self._layers is not None
            self._layers.unload(slot)
            self._broken.pop(slot, None)
            self._slots.pop(slot, None)
            if folder:
                self._slots[slot] = 0
                self._load(self._layers, slot, folder)
        return None

    def _load(self, layers: AdapterLayers, slot: int, folder: str) -> None:
        started, problem, taken = time.monotonic(), "", 0
        try:
            taken = layers.load(slot, read_adapter(Path(folder)), self._dtype)
        except ModelError as error:
            problem = str(error)
            log.error("an adapter cannot be loaded: %s", error)  # noqa: TRY400 - the message says it all
        if self._rank.layout.ranks > 1 and not self._rank.communicator.all_agree(not problem) and not problem:
            layers.unload(slot)
            problem = "another rank of the model cannot load the adapter; the log says why"
        if problem:
            self._broken[slot] = problem
            return
        self._slots[slot] = taken
        self.prepare(taken)
        seconds = time.monotonic() - started
        log.info("adapter %s: %.1f MB in %.0f ms", Path(folder).name, taken / 1e6, seconds * 1e3)

    def prepare(self, nbytes: int = 0) -> None:
        """Have memory ready for one more adapter, if none has to leave for it (`AdapterLayers.prepare`)."""
        has_room = len(self._slots) < MAX_SLOTS and sum(self._slots.values()) + nbytes <= self._limit
        if self._layers is not None and has_room:
            self._layers.prepare(self._dtype, nbytes)

    def failures(self, rows: Sequence[ScheduledRequest]) -> dict[str, str]:
        """Return the requests whose adapter could not be loaded, with the reason."""
        broken = self._broken
        named = ((row.request.request_id, row.request.adapter_slot) for row in rows) if broken else ()
        return {name: broken[slot] for name, slot in named if slot in broken}
