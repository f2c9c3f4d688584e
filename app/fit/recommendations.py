"""Fit of every recommended model on this machine, from the package's own data: the hub is not asked."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware.machine import Machine
from llmbox.engine.planning.estimator import show_bytes

from ..hub.model_info import ModelFacts, parse_config_files
from ..models.recommended import RecommendedModel, family_of, recommended
from .bandwidth import Bandwidth
from .fit import Fit, fit

PUBLISHED_BYTES = 2
"""Bytes of a published parameter: bfloat16."""
FIRST_CHOICES = {"Quick": 25.0, "Balanced": 10.0, "Best that fits": 0.0}
"""Choices offered to a newcomer: label and least tokens a second of one stream, at the memory's best."""
SIBLINGS = 2
"""Models named in place of one that does not fit."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommended model and its fit here. `here`: it is on this disk."""

    model: RecommendedModel
    fit: Fit
    here: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `llmbox search --json` and of the admin API."""
        model, plan, speed = self.model, self.fit.plan, self.fit.speed
        return {
            "name": model.name,
            "default": model.default,
            "repo": model.repo,
            "purpose": model.purpose,
            "license": model.license,
            "gated": model.gated,
            "params": model.params,
            "here": self.here,
            "fits": self.fit.fits,
            "reason": self.fit.reason,
            "download_bytes": self.fit.disk_need,
            "context": plan.context if plan else None,
            "memory": plan.total_bytes if plan else None,
            "tokens_per_second": list(speed.one_stream) if speed else None,
        }


def recommend(
    machine: Machine,
    config: EngineConfig,
    *,
    budget_gb: float | None,
    disk: Path,
    bandwidth: Bandwidth | None,
    present: Collection[str] = (),
) -> list[Recommendation]:
    """Plan every recommended model as `fit` does, with the options of `config`.

    `present`: names of the models on this disk. Raises DeviceError where there is no such device.
    """
    found = []
    for model in recommended():
        size = model.params * PUBLISHED_BYTES
        here = model.repo in present
        facts = ModelFacts(
            name=model.repo,
            config=parse_config_files({"config.json": model.config}),
            stored_bytes=size,
            stored_params=model.params,
            disk_bytes=size,
            missing_bytes=0 if here else size,
        )
        plan = fit(facts, machine, config, budget_gb=budget_gb, disk=disk, bandwidth=bandwidth)
        found.append(Recommendation(model, plan, here))
    return found


def smaller_models(name: str, found: list[Recommendation]) -> Iterator[str]:
    """Yield models that fit in place of `name`, largest first: of its family, else for chat."""
    family = family_of(name.partition("@")[0])
    fitting = [each for each in found if each.fit.fits and each.model.repo != name]
    of_family = [each for each in fitting if each.model.family == family]
    for each in sorted(
        of_family or [each for each in fitting if each.model.purpose == "chat"],
        key=lambda each: -each.model.params,
    )[:SIBLINGS]:
        plan = each.fit.plan
        assert plan is not None
        yield f"{each.model.name}: {show_bytes(plan.total_bytes)} with a context of {plan.context} tokens"


def first_choices(found: list[Recommendation]) -> dict[str, Recommendation]:
    """Return up to three chat models for a newcomer by label, fastest first: none is gated, all fit, no model
    occurs twice.
    """
    fitting = [
        each
        for each in found
        if each.fit.fits and not each.model.gated and each.model.purpose in {"chat", "tiny"}
    ]
    fitting.sort(key=lambda each: each.model.params)
    chosen: dict[str, Recommendation] = {}
    if not fitting:
        return chosen
    for label, rate in FIRST_CHOICES.items():
        fast = [each for each in fitting if each.fit.speed is None or each.fit.speed.one_stream[1] >= rate]
        best = fast[-1] if fast else fitting[0]
        if best not in chosen.values():
            chosen[label] = best
    return chosen
