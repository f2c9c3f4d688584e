"""Load request: a model with its options."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from llmbox.engine.config import AUTO, EngineConfig, UseMTP, parse_disaggregate
from llmbox.engine.errors import EngineError

from ..config.entries import Scalar
from ..config.loader import find_overrides
from ..config.model_settings import ModelSettings
from .catalog import ModelRef, check_name, resolve

_OTHER_VALUES = {"overlap", "disaggregate"}
"""Settings of which `EngineConfig` has the names with other values."""
_SAME = tuple(
    each.name
    for each in fields(ModelSettings)
    if each.name in EngineConfig.__dataclass_fields__ and each.name not in _OTHER_VALUES
)
"""Settings of a model that `EngineConfig` has under the same name, with the same values."""

_MTP: dict[str, UseMTP] = {"mtp": "on", "none": "off"}
"""Values of `draft` that name no model: the checkpoint's layer for multi-token prediction, or nothing."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Model to load. `options` are settings of this model alone, by full key (`model.ctx`)."""

    ref: ModelRef
    alias: str | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def served_name(self) -> str:
        """Name to serve under. The alias replaces the folder's name if the directory was not adopted."""
        renamed = self.alias is not None and self.ref.source == "directory" and not self.ref.registered
        return self.alias if renamed and self.alias else self.ref.name

    @property
    def extra_alias(self) -> str | None:
        return None if self.alias == self.served_name else self.alias

    def body(self) -> dict[str, Any]:
        """Body for the admin API."""
        return {"model": self.ref.load_ref, "alias": self.alias, "options": self.short_options}

    @property
    def short_options(self) -> dict[str, Scalar]:
        return {name.partition(".")[2]: value for name, value in self.options.items()}

    def config(self, defaults: ModelSettings) -> EngineConfig:
        """Return the engine's configuration: `options` first, then the model's own settings, then those of
        all models. Raises CliError.
        """
        given = {**find_overrides(defaults.overrides, self.served_name), **self.options}

        def value(key: str) -> Any:
            return given.get(f"model.{key}", getattr(defaults, key))

        config = _engine_config(value, str(self.ref.path), check_name(self.served_name))
        draft = value("draft")
        if draft and draft not in _MTP:
            config = replace(config, draft_path=str(resolve(draft, os.environ).path))
        if config.device == "auto" and self._is_bidirectional():
            config = replace(config, device="cpu")
        return config

    def _is_bidirectional(self) -> bool:
        """Return True for an encoder, which runs on the CPU of a machine with GPUs too."""
        from llmbox.engine.model_config.config import parse_config  # noqa: PLC0415 - commands start without it

        try:
            return parse_config(self.ref.path).is_bidirectional
        except EngineError:  # loading says why
            return False


def default_engine(settings: ModelSettings) -> EngineConfig:
    """Return the engine's configuration of a model that is loaded without flags, but for the model itself and
    its draft model.
    """
    return _engine_config(lambda key: getattr(settings, key), "", "")


def _engine_config(value: Callable[[str], Any], path: str, name: str) -> EngineConfig:
    """Convert settings of a model. `value` returns one by its short key. No draft model is set."""
    memory, host = value("memory"), value("kv_host_memory")
    return EngineConfig(
        model_path=path,
        name=name,
        context=value("ctx"),
        memory_bytes=None if memory is None else int(memory * 1e9),
        kv_host_bytes=None if host is None else int(host * 1e9),
        overlap=None if value("overlap") else False,
        mtp=_MTP.get(value("draft"), "auto"),
        lora_bytes=int(value("lora_memory") * 1e9),
        disaggregate=parse_disaggregate(value("disaggregate")),
        auto_disaggregate=value("disaggregate") == AUTO,
        **{key: value(key) for key in _SAME},
    )


def show_pair(pair: tuple[int, int] | None) -> str:
    """Format the cores of `--disaggregate` as P:D; empty for one engine."""
    return "" if pair is None else "{}:{}".format(*pair)


def with_draft_path(options: Mapping[str, Scalar], find: Callable[[str], ModelRef]) -> dict[str, Scalar]:
    """Replace the name of the draft model in `options` by its directory. Raises CliError."""
    draft = options.get("model.draft")
    if not draft or draft in _MTP:
        return dict(options)
    return {**options, "model.draft": str(find(str(draft)).path)}


def options_of(config: EngineConfig) -> dict[str, Scalar]:
    """Return the model settings of a configuration by short key. `up` compares them with its flags."""
    memory, host = config.memory_bytes, config.kv_host_bytes
    return {
        **{name: getattr(config, name) for name in _SAME},
        "ctx": config.context,
        "memory": None if memory is None else memory / 1e9,
        "kv_host_memory": None if host is None else host / 1e9,
        "overlap": config.overlap is not False,
        "draft": config.draft_path or {"auto": "", "on": "mtp", "off": "none"}[config.mtp],
        "lora_memory": config.lora_bytes / 1e9,
        "disaggregate": AUTO if config.auto_disaggregate else show_pair(config.disaggregate),
    }
