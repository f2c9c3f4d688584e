"""Recommended models: short names for repositories of the hub, with what is needed to plan them offline.

`app/assets/recommended.json` has one model a line: name, repository, purpose, license, parameter count, and
the fields of its config.json that decide its memory. A name is `family:size`; the family alone means its
default size. What the hub says of these repositories is kept in a file of the cache once somebody asks it
(`llmbox search --refresh`), and counts from then on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

Purpose = Literal["chat", "code", "vision", "embedding", "reranking", "tiny"]
FILE = Path(__file__).parents[1] / "assets" / "recommended.json"
PUBLISHED_BYTES = 2
"""Bytes of a published parameter: bfloat16."""


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
    files: int = 0
    """Bytes of the files to download, as the hub told; 0: not asked."""

    @property
    def download_bytes(self) -> int:
        return self.files or self.params * PUBLISHED_BYTES

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]


@cache
def recommended() -> tuple[RecommendedModel, ...]:
    """Return all recommended models, families together, the smallest of a family first."""
    return tuple(RecommendedModel(**row) for row in json.loads(FILE.read_text()))


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFacts:
    """Facts of a recommended repository, as the hub told them."""

    license: str
    gated: bool
    params: int
    files: int
    """Bytes of the files to download."""
    config: dict[str, Any]


def read_hub_facts(file: Path) -> dict[str, HubFacts]:
    """Return what the hub was asked for, by repository; nothing if it was not, or the file is damaged."""
    import msgspec  # noqa: PLC0415 - the command line starts without it

    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, HubFacts])
    except (OSError, msgspec.MsgspecError):
        return {}


def keep_hub_facts(file: Path, found: Mapping[str, HubFacts]) -> None:
    """Keep facts beside those of an earlier time. Raises OSError."""
    import msgspec  # noqa: PLC0415 - the command line starts without it

    from ..util.atomic_file import write_whole  # noqa: PLC0415 - used after a refresh alone

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(file, msgspec.json.encode(read_hub_facts(file) | dict(found)))


def with_hub_facts(model: RecommendedModel, facts: HubFacts | None) -> RecommendedModel:
    if facts is None:
        return model
    return replace(
        model,
        license=facts.license or model.license,
        gated=facts.gated,
        params=facts.params,
        files=facts.files,
        config=facts.config,
    )


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
