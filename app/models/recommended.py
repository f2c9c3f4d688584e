"""Recommended models: short names for repositories of the hub, with what is needed to plan them offline.

`app/assets/recommended.json` has one model a line: name, repository, purpose, license, parameter count, and
the fields of its config.json that decide its memory. A name is `family:size`; the family alone means its
default size.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Purpose = Literal["chat", "code", "embedding", "reranking", "tiny"]
FILE = Path(__file__).parents[1] / "assets" / "recommended.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedModel:
    name: str
    """Short name, `family:size`."""
    default: bool
    """The family's name alone means this size."""
    repo: str
    purpose: Purpose
    license: str
    gated: bool
    """The hub asks for a token and the acceptance of the license."""
    params: int
    config: dict[str, Any]
    """Fields of config.json that decide shape and memory."""

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]


@cache
def recommended() -> tuple[RecommendedModel, ...]:
    """Return all recommended models, families together, the smallest of a family first."""
    return tuple(RecommendedModel(**row) for row in json.loads(FILE.read_text()))


@cache
def _by_name() -> dict[str, RecommendedModel]:
    models = recommended()
    families = {model.family: model for model in models if model.default}
    return {model.name: model for model in models} | families


def full_name(text: str) -> str:
    """Return the repository that a short name means, ignoring case; other text is returned unchanged."""
    found = _by_name().get(text.lower())
    return text if found is None else found.repo


def short_names() -> set[str]:
    """Return every short name, for suggestions."""
    return set(_by_name())


def family_of(repo: str) -> str:
    """Return the family of a recommended repository; empty for others."""
    return next((model.family for model in recommended() if model.repo.lower() == repo.lower()), "")
