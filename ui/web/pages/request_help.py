"""Errors of requests explained: what each means, and what helps as a button, a page or the exact command."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from llmbox.app.http.admin.models import describe_all
from llmbox.app.http.admin.schema import ModelStatus
from llmbox.app.store.record import RequestRecord
from llmbox.engine.errors import EngineError
from llmbox.engine.model_config.config import parse_config

from ..render import PageContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing to do: a form that is sent to `route`, a page to open, or a command for a terminal."""

    label: str = ""
    route: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    page: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class ErrorHelp:
    """Explanation of an error code."""

    meaning: str
    advice: str
    remedies: "Callable[[RequestRecord, ModelStatus | None], list[Remedy]]" = lambda *_: []
    """Builds remedies for a request and its model, if that is in memory or failed."""


def remedies(panel: PageContext, record: RequestRecord) -> list[Remedy]:
    """Return what helps against the error of a request, in the current state of the box."""
    found = HELP.get(record.error_code)
    if found is None:
        return []
    names = {record.model} - {""}
    model = next((each for each in describe_all(panel.control) if names & {each.name, *each.aliases}), None)
    return found.remedies(record, model)


def _setting(name: str, value: str) -> list[Remedy]:
    command = f"llmbox config set {name} {value}"
    return [Remedy(label="Change the setting", page=f"/admin/settings#{name}"), Remedy(command=command)]


def _key(record: RequestRecord, option: str) -> list[Remedy]:
    if not record.key:
        return [Remedy(label="Open the keys", page="/admin/keys")]
    command = f"llmbox key set {shlex.quote(record.key)} {option}"
    return [Remedy(label="Change the key's limits", page="/admin/keys"), Remedy(command=command)]


def _load(record: RequestRecord, model: ModelStatus | None) -> list[Remedy]:
    """Offer to load a model that is not in memory, or to load it again after a failure."""
    if not record.model or (model is not None and model.state != "failed"):
        return []
    ref = model.ref if model is not None else record.model
    load = Remedy(label=f"Load {record.model}", route="/admin/models/load", fields={"model": ref})
    return [load, Remedy(command=f"llmbox load {shlex.quote(ref)}")]


def _keep(record: RequestRecord, model: ModelStatus | None) -> list[Remedy]:
    """Offer to pin a model that is in memory, and to load one that is not."""
    if model is None or model.state != "ready":
        return _load(record, model)
    if model.pinned:
        return []
    fields = {"model": model.name, "pinned": "1"}
    pin = Remedy(label=f"Pin {model.name} in memory", route="/admin/models/pin", fields=fields)
    return [pin, Remedy(command=f"llmbox pin {shlex.quote(model.name)}")]


def _find(record: RequestRecord, model: ModelStatus | None) -> list[Remedy]:
    if model is not None:
        return _load(record, model)
    search = Remedy(label="Search for it", page=f"/admin/models/discover?{urlencode({'text': record.model})}")
    pull = Remedy(command=f"llmbox pull {shlex.quote(record.model)}") if record.model else Remedy()
    return [search, pull]


def _lengthen(record: RequestRecord, model: ModelStatus | None) -> list[Remedy]:
    """Offer to load the model with twice its context, or with its trained context if that is less."""
    if model is None or model.info is None:
        return _load(record, model)
    wanted = min(2 * model.info.context_window, _context_limit(model))
    if wanted <= model.info.context_window:
        return [Remedy(label="Find a model with a longer context", page="/admin/models/discover")]
    query = urlencode({"ref": model.ref, "ctx": wanted})
    plan = Remedy(label=f"Plan {wanted:,} tokens of context", page=f"/admin/models/show?{query}")
    name, ref = shlex.quote(model.name), shlex.quote(model.ref)
    return [plan, Remedy(command=f"llmbox unload {name} && llmbox load {ref} --ctx {wanted}")]


def _context_limit(model: ModelStatus) -> int:
    """Return the trained context of a model; 0 if its files cannot be read any more."""
    try:
        return parse_config(Path(model.path)).context_limit
    except EngineError:
        return 0


def _make_room(record: RequestRecord, model: ModelStatus | None) -> list[Remedy]:
    room = Remedy(label="See who holds the memory", page="/admin/memory")
    return [*_load(record, model), room, *_setting("memory.budget", "GB")]


def _read_log(record: RequestRecord, model: ModelStatus | None) -> list[Remedy]:
    log = Remedy(label="Read the log", page="/admin/system?level=error#log-title")
    return [*_load(record, model), log, Remedy(command="llmbox logs --level error")]


def _allow(record: RequestRecord, _: ModelStatus | None) -> list[Remedy]:
    name = shlex.quote(record.model or "NAME")
    command = f"llmbox key add NEW_KEY --model {name}"
    return [Remedy(label="Make a key that may", page="/admin/keys"), Remedy(command=command)]


HELP: Final = {
    "rate_limit_exceeded": ErrorHelp(
        "The key reached its limit of requests or tokens per minute.",
        "Let the client wait as Retry-After says, or raise the limit.",
        lambda record, _: _key(record, "--rpm N --tpm N"),
    ),
    "insufficient_quota": ErrorHelp(
        "The key used up a quota or budget of its day or month.",
        "Days begin at 00:00 UTC, months on the 1st. Wait until then, or raise the quota.",
        lambda record, _: _key(record, "--tokens-day N --tokens-month N"),
    ),
    "queue_full": ErrorHelp(
        "More requests waited for the model than its queue holds.",
        "Send fewer at once, or lengthen the queue.",
        lambda *_: _setting("limits.queue", "1024"),
    ),
    "context_length_exceeded": ErrorHelp(
        "Prompt and answer together are longer than the model's context.",
        "Shorten the prompt, ask for fewer tokens, or load the model with a longer context.",
        _lengthen,
    ),
    "model_not_found": ErrorHelp(
        "No model of that name was on this disk.", "Check the name, or download the model.", _find
    ),
    "model_required": ErrorHelp(
        "The request named no model, and several were in memory.",
        "Name one in the field model.",
        lambda *_: [Remedy(label="See the models", page="/admin/models")],
    ),
    "model_loading": ErrorHelp(
        "The model was being loaded.", "Try again now; pin models that must answer at once.", _keep
    ),
    "model_load_failed": ErrorHelp(
        "The model's last load failed.",
        "The log has the reason; load it again once that is fixed.",
        _read_log,
    ),
    "model_unloaded": ErrorHelp("The model was unloaded.", "Load it again.", _keep),
    "model_evicted": ErrorHelp(
        "The model was evicted for another one.",
        "Load it and pin it, or raise the memory of all models.",
        _keep,
    ),
    "memory_busy": ErrorHelp(
        "The model did not fit beside the others, which were busy.",
        "Load it now, unload another, or raise the memory of all models.",
        _make_room,
    ),
    "does_not_fit": ErrorHelp(
        "The model is larger than the memory that models may use.",
        "Load a smaller one or smaller weights (int8, int4), or raise the memory of all models.",
        lambda *_: [
            Remedy(label="See recommended models", page="/admin/models/discover"),
            *_setting("memory.budget", "GB"),
        ],
    ),
    "model_not_allowed": ErrorHelp("The key may not use that model.", "Use a key that may.", _allow),
    "engine_failed": ErrorHelp(
        "The model's engine had died five times in a minute.",
        "The log has the reason; load the model again once that is fixed.",
        _read_log,
    ),
    "engine_error": ErrorHelp("The engine failed on this request.", "The log has the reason.", _read_log),
    "engine_crashed": ErrorHelp(
        "The engine died while it worked on this request.", "The log has the reason.", _read_log
    ),
    "request_timeout": ErrorHelp(
        "The answer took longer than the time limit.",
        "Ask for fewer tokens, or raise the limit.",
        lambda *_: _setting("limits.request_timeout", "SECONDS"),
    ),
    "first_token_timeout": ErrorHelp(
        "No token came within the time limit.",
        "Run fewer requests at once, or raise the limit.",
        lambda *_: _setting("limits.first_token_timeout", "SECONDS"),
    ),
    "draining": ErrorHelp("The daemon was shutting down.", "Send the request again."),
    "request_cancelled": ErrorHelp(
        "An administrator of this box cancelled the request.", "Send it again if that was a mistake."
    ),
    "client_disconnected": ErrorHelp(
        "The client closed its connection before the answer was complete.",
        "Raise the client's own time limit, or stream the answer.",
    ),
}
"""Explanations by error code."""
