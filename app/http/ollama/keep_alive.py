"""`keep_alive`: the idle time after which a model leaves memory, within what a request may decide."""

import math
import re
from typing import Literal

from ...control.controller import DaemonController
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...security.identity import Identity
from ..openai.request_context import RequestContext

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_NUMBER = r"(?:\d{1,12}(?:\.\d{0,12})?|\.\d{1,12})"
_PIECE = re.compile(rf"({_NUMBER})({'|'.join(_UNITS)})")
_DURATION = re.compile(rf"[+-]?(?:{_NUMBER}|(?:{_PIECE.pattern})+)")
NOT_DECIDED = (
    "'keep_alive' has no effect: this model was loaded by the owner. It takes effect with the scope admin."
)


def seconds_of(value: float | str | None) -> float | None:
    """Parse idle seconds, infinite for negative values; None where the field is absent. Raises
    ApiError 400.
    """
    if value is None:
        return None
    seconds = _parse_duration(value.strip()) if isinstance(value, str) else float(value)
    return math.inf if seconds < 0 else seconds


def _parse_duration(text: str) -> float:
    """Parse Go's durations (`1h30m`) and plain seconds."""
    if not _DURATION.fullmatch(text):
        raise ApiError(
            400,
            "Invalid value for 'keep_alive': it is seconds, or a duration such as '5m' or '1h30m'.",
            code="invalid_value",
            param="keep_alive",
        )
    sign = -1 if text.startswith("-") else 1
    pieces = _PIECE.findall(text)
    if not pieces:
        return float(text)
    return sign * sum(float(number) * _UNITS[unit] for number, unit in pieces)


def may_decide(caller: Identity, model: LoadedModel) -> bool:
    """Return True if the caller may change the idle time: requests may unload a model that a request loaded;
    all else is the owner's.
    """
    return caller.may("admin") or (model.on_request and not model.pinned)


def keep_for(control: DaemonController, caller: Identity, name: str, seconds: float) -> list[str]:
    """Set the idle time. Returns warnings where the caller may not decide it."""
    model = control.services.engines.find(name)
    if model is None:  # gone meanwhile
        return []
    if not may_decide(caller, model):
        return [NOT_DECIDED]
    control.residency.set_ttl(model, None if math.isinf(seconds) else seconds)
    return []


async def load_or_unload(
    control: DaemonController, call: RequestContext, name: str, keep_alive: float | str | None
) -> tuple[Literal["load", "unload"], list[str]]:
    """Handle a request without a prompt: load the model, or unload it where `keep_alive` is 0.

    Returns what was done, and warnings.
    """
    seconds = seconds_of(keep_alive)
    if seconds == 0:
        call.caller.require_model(name)
        await unload(control, call.caller, name)
        return "unload", []
    model = await call.find_model(name)
    warnings = keep_for(control, call.caller, model.name, seconds) if seconds is not None else []
    return "load", warnings


async def unload(control: DaemonController, caller: Identity, name: str) -> None:
    """Unload a model once nobody uses it. A model that is on disk only is left alone.

    Raises ApiError 403, 404, 409.
    """
    model = control.services.engines.find(control.residency.real_name(name))
    if model is None:
        if not await control.places([name]):
            raise ApiError(404, f"The model {name!r} does not exist here.", "model_not_found", "model")
        return
    if not may_decide(caller, model):
        message = (
            f"{model.name} was loaded by the box's owner: unloading it needs a key with the scope admin."
        )
        raise ApiError(403, message, "insufficient_scope", None, "permission_error")
    await control.residency.release(model)
