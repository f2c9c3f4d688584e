"""Evicted models of the box's owner: how each was loaded, so that a request can bring it back."""

from dataclasses import dataclass
from pathlib import Path

from llmbox.engine.config import EngineConfig

from ..engines.loaded_model import LoadedModel
from ..errors import ApiError


@dataclass(frozen=True, slots=True)
class EvictedModel:
    """Options that a model was loaded with, and the reason of its eviction."""

    config: EngineConfig
    aliases: frozenset[str]
    ttl: float | None
    reason: str

    @property
    def name(self) -> str:
        return self.config.name

    def unavailable(self) -> ApiError:
        return ApiError(
            503,
            f"{self.name} left memory {self.reason}, and requests load no models here. "
            f"Ask the box's owner to load it again: llmbox load {self.name}",
            "model_evicted",
            type="server_error",
            headers={"Retry-After": "60"},
        )


class EvictedModels:
    """Table of evicted models. Kept apart from the models on disk, because a folder loaded by path has no
    name there.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, EvictedModel] = {}

    def add(self, model: LoadedModel, reason: str) -> None:
        self._by_name[model.name] = EvictedModel(model.config, model.aliases, model.ttl, reason)

    def find(self, name: str) -> EvictedModel | None:
        """Find by name or alias."""
        if (exact := self._by_name.get(name)) is not None:
            return exact
        return next((each for each in self._by_name.values() if name in each.aliases), None)

    def find_name_by_path(self, path: Path) -> str | None:
        """Name of the evicted model with this folder."""
        return next((each.name for each in self.all() if Path(each.config.model_path) == path), None)

    def forget(self, name: str) -> bool:
        """Forget a model. Returns False if there is none."""
        found = self.find(name)
        return found is not None and self._by_name.pop(found.name, None) is not None

    def all(self) -> list[EvictedModel]:
        return list(self._by_name.values())
