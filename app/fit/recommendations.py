"""Fit of models on this machine with its owner's settings, and of every recommended one, from the package's
own data: the hub is not asked.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import EngineError
from llmbox.engine.hardware.machine import read_machine
from llmbox.engine.model_config.config import ModelConfig
from llmbox.engine.planning.estimator import MemoryPlan, show_bytes

from ..config.paths import Paths
from ..config.settings import Settings
from ..engines.eviction import usable_device
from ..hub.model_info import ModelFacts, parse_config_files
from ..models.catalog import hub_cache, on_disk
from ..models.load_request import default_engine
from ..models.registry import (
    HubFacts,
    NameLookup,
    RecommendedModel,
    family_of,
    read_hub_facts,
    recommended,
    with_hub_facts,
)
from ..util.formatting import rate_range
from .bandwidth import device_bandwidth
from .fit import Fit, FitSite, Speed, fit, plan_alone

USABLE_RATE = 5.0
"""Tokens a second, the middle of the predicted range, below which a reader waits for words."""
FIRST_CHOICES = {"Best": USABLE_RATE, "Balanced": 2 * USABLE_RATE, "Quick": 4 * USABLE_RATE}
"""Choices offered to a newcomer: label and least tokens a second of one stream."""
APART = 1.5
"""Least ratio between the sizes of two choices."""
SMALLEST = "Smallest"
"""Label of the one choice where no model reaches `USABLE_RATE`."""
SIBLINGS = 2
"""Models named in place of one that does not fit."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommended model and its fit here. `here`: it is on this disk."""

    model: RecommendedModel
    fit: Fit
    here: bool

    @property
    def is_usable(self) -> bool:
        """True if it fits and is expected to answer as fast as people read; unknown speeds count as fast."""
        return self.fit.fits and (self.fit.speed is None or self.fit.speed.expected >= USABLE_RATE)

    @property
    def fitting_quant(self) -> str:
        """Weight format with which a model fits that does not fit as published; empty: none does."""
        flags = (remedy.partition(":")[0].split() for remedy in self.fit.remedies)
        return next((words[1] for words in flags if words[0] == "--quant"), "")

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `llmbox search --json` and of the admin API."""
        model, plan, speed = self.model, self.fit.plan, self.fit.speed
        return {
            "name": model.name,
            "default": model.default,
            "repo": model.repo,
            "purpose": model.purpose,
            "reads_images": model.reads_images,
            "license": model.license,
            "gated": model.gated,
            "params": model.params,
            "here": self.here,
            "fits": self.fit.fits,
            "fitting_quant": self.fitting_quant,
            "reason": self.fit.reason,
            "download_bytes": self.fit.disk_need,
            "context": plan.context if plan else None,
            "memory": plan.total_bytes if plan else None,
            "tokens_per_second": list(speed.one_stream) if speed else None,
            "usable": self.is_usable,
        }


def recommend(
    config: EngineConfig,
    site: FitSite,
    present: Collection[str] = (),
    hub_facts: Mapping[str, HubFacts] | None = None,
) -> list[Recommendation]:
    """Plan every recommended model as `fit` does, with the options of `config`.

    None is proposed with experts in main memory. `present`: names of the models on this disk. `hub_facts`:
    what the hub said of them when it was asked last.
    Raises DeviceError where there is no such device.
    """
    found, config = [], replace(config, cpu_experts="off")
    for packaged in recommended():
        model, parsed = _current(packaged, (hub_facts or {}).get(packaged.repo))
        size = model.download_bytes
        here = model.repo in present
        facts = ModelFacts(
            name=model.repo,
            config=parsed,
            stored_bytes=size,
            stored_params=model.params,
            missing_bytes=0 if here else size,
        )
        found.append(Recommendation(model, fit(facts, config, site), here))
    return found


@dataclass(frozen=True, slots=True)
class LocalPlanner:
    """Planner of models on this machine, with its owner's settings. May be used from any thread."""

    settings: Settings
    paths: Paths
    environ: Mapping[str, str]

    @property
    def engine(self) -> EngineConfig:
        """Options of a model that is loaded without flags."""
        return default_engine(self.settings.model)

    def plan(self, config: ModelConfig) -> tuple[MemoryPlan | None, str]:
        """Plan a model that is alone in memory and loaded without flags. None with the reason where it cannot
        be served.
        """
        return plan_alone(config, read_machine(), self.engine, self.settings.memory.budget)

    def fit(self, facts: ModelFacts, config: EngineConfig, *, kv_disk: int = 0, probe: bool = False) -> Fit:
        """Plan a model with the options of `config`. `kv_disk`: bytes of the KV cache on disk; `probe`
        measures the memory bandwidth again. Raises DeviceError where there is no such device.
        """
        return fit(facts, config, replace(self._site(config, probe=probe), kv_disk=kv_disk))

    def _site(self, config: EngineConfig, *, probe: bool = False) -> FitSite:
        machine, file = read_machine(), self.paths.bandwidth_file
        device = usable_device(machine, config.device)
        return FitSite(
            machine=machine,
            budget_gb=self.settings.memory.budget,
            disk=hub_cache(self.environ),
            bandwidth=device_bandwidth(machine, device, file, config.threads, refresh=probe),
            host_bandwidth=lambda: device_bandwidth(machine, "cpu", file, config.threads, refresh=probe),
        )

    def recommend(self, names: NameLookup, config: EngineConfig | None = None) -> list[Recommendation]:
        """Plan every recommended model, with the options of `config`. `names`: registered names of models.
        Raises DeviceError where there is no such device.
        """
        config = config or self.engine
        present = {model.ref.name for model in on_disk(self.environ, names)}
        return recommend(config, self._site(config), present, read_hub_facts(self.paths.recommended_file))


def _current(model: RecommendedModel, hub_facts: HubFacts | None) -> tuple[RecommendedModel, ModelConfig]:
    """Return a model as the hub described it; as the package does where that cannot be served."""
    current = with_hub_facts(model, hub_facts)
    try:
        return current, parse_config_files({"config.json": current.config})
    except EngineError:
        return model, parse_config_files({"config.json": model.config})


def smaller_models(name: str, found: list[Recommendation]) -> Iterator[str]:
    """Yield models that fit in place of `name`, of its family or else for chat. Those with a usable speed
    come first, and larger ones before smaller ones.
    """
    family = family_of(name.partition("@")[0])
    fitting = [each for each in found if each.fit.fits and each.model.repo != name]
    of_family = [each for each in fitting if each.model.family == family]
    for each in sorted(
        of_family or [each for each in fitting if each.model.purpose == "chat"],
        key=lambda each: (not each.is_usable, -each.model.params),
    )[:SIBLINGS]:
        plan, speed = each.fit.plan, each.fit.speed
        assert plan is not None
        text = f"{each.model.name}: {show_bytes(plan.total_bytes)} with a context of {plan.context} tokens"
        yield text + (f", {rate_range(*speed.one_stream)} tokens/s" if speed else "")


def first_choices(found: list[Recommendation]) -> dict[str, Recommendation]:
    """Return up to three chat models for a newcomer by label, fastest first. They fit and are not gated.

    Each is the largest that reaches the speed of its label and is clearly smaller than the slower one next to
    it. Where none is fast enough, the result is the smallest alone.
    """
    fitting = [
        each
        for each in found
        if each.fit.fits and not each.model.gated and each.model.purpose in {"chat", "tiny"}
    ]
    fitting.sort(key=lambda each: each.model.params)
    chosen: dict[str, Recommendation] = {}
    most = inf
    for label, rate in FIRST_CHOICES.items():
        for each in reversed(fitting):
            if each.model.params <= most and (each.fit.speed is None or each.fit.speed.expected >= rate):
                chosen[label], most = each, each.model.params / APART
                break
    if fitting and not chosen:
        return {SMALLEST: fitting[0]}
    return dict(reversed(chosen.items()))


def begin_with(choices: Mapping[str, Recommendation]) -> Recommendation:
    """Return the choice to begin with, of at least one: the balanced one, else the fastest."""
    return choices.get("Balanced") or next(iter(choices.values()))


def slow_warning(speed: Speed | None, found: list[Recommendation]) -> str:
    """Return a sentence about a speed below `USABLE_RATE`, with the largest chat model above it; else ""."""
    if speed is None or speed.expected >= USABLE_RATE:
        return ""
    text = f"expected here: {rate_range(*speed.one_stream)} tokens/s, slower than people read"
    best = first_choices(found).get("Best")
    return f"{text}; {best.model.name} is the largest recommended one that keeps up" if best else text
