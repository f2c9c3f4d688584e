"""Known fields that are not supported are refused by name; unknown fields become warnings."""

from functools import cache
from typing import Any, get_type_hints

import msgspec

from ...errors import ApiError
from .request_types import Later, Never

HARMLESS: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "include_reasoning": (True,),
    "use_beam_search": (False,),
    "documents": ([],),
    "allowed_callers": (["direct"], []),
    "context_management": ([],),
    "access_programs": ([],),
    "mcp_servers": ([],),
    "template": ("",),
    "context": ([],),
    "mirostat": (0,),
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
    "speed": ("standard",),
    "fallbacks": ([],),
    "inference_geo": ("not_available",),
}
"""Values that ask for what happens anyway. null and absence always do."""

_REASONS = {
    "use_beam_search": "Answers are drawn: 'n' gives several, 'temperature' 0 the greedy one.",
    "chat_template": "Only the model's own chat template is used.",
    "truncate_prompt_tokens": "Documents are never cut: one over the context gets an error instead.",
    "service_tier": "There is one tier: 'default'.",
    "modalities": "Only text is generated.",
    "max_chunks_per_doc": "Documents are never cut: one over the context gets an error instead.",
    "template": "Only the model's own chat template is used.",
    "context": "Send the conversation to /api/chat.",
    "width": "Only text is generated.",
    "height": "Only text is generated.",
    "steps": "Only text is generated.",
    "mirostat": "Samplers here are temperature, top_k, top_p and min_p.",
    "tfs_z": "Samplers here are temperature, top_k, top_p and min_p.",
    "typical_p": "Samplers here are temperature, top_k, top_p and min_p.",
    "allowed_callers": "The model calls tools directly, and nothing else does.",
    "context_management": "Ask for /v1/responses/compact, or for truncation: 'auto'.",
    "personality": "Models here have no styles to choose from.",
    "mcp_servers": "Nothing is asked of other servers: connect to them in the client, and send their tools.",
    "container": "No code is run for a model here.",
    "speed": "There is one speed: 'standard'.",
    "inference_geo": "Answers are made on this machine.",
    "fallbacks": "Fallback models are not supported: name the model to use.",
    "fallback_credit_token": "Nothing is billed here.",
    "billing_policy": "Nothing is billed here.",
}


def refuse_unsupported(request: msgspec.Struct, inside: str = "") -> None:
    """Refuse the first field that this build cannot honour. Raises ApiError 400 with `param`.

    `inside`: of the field that holds `request`, with a dot at its end.
    """
    for name in _refusable(type(request)):
        value = getattr(request, name)
        if value is not None and not _harmless(name, value):
            reason = _REASONS.get(name, "This server does not support it yet.")
            raise ApiError(
                400,
                f"The value of '{inside}{name}' is not supported. {reason}",
                code="unsupported_parameter",
                param=inside + name,
            )


def unknown_fields(kind: type[msgspec.Struct], plain: dict[str, Any], inside: str = "") -> list[str]:
    """Return warnings for fields that `kind` does not have."""
    return [
        f"Unknown field '{inside}{name}' was ignored." for name in plain if name not in kind.__struct_fields__
    ]


@cache
def _refusable(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(name for name in kind.__struct_fields__ if hints[name] in (Later, Never))


def _harmless(name: str, value: Any) -> bool:
    return any(type(value) is type(known) and value == known for known in HARMLESS.get(name, ()))
