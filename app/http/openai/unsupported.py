"""Fields that are not supported: known ones, and those of other servers, are refused by name; others become
warnings.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, get_type_hints

import msgspec

from ...errors import unsupported_parameter
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
"""Values that request the default behavior. null and absence always do."""

_REASONS = {
    "functions": "Send 'tools', which replaced it.",
    "function_call": "Send 'tool_choice', which replaced it.",
    "web_search_options": "This server does not search the web: let the client do it, as a tool.",
    "audio": "Only text is generated.",
    "documents": "Put them into a message.",
    "use_beam_search": "Answers are drawn: 'n' gives several, 'temperature' 0 the greedy one.",
    "chat_template": "Only the model's own chat template is used.",
    "truncate_prompt_tokens": "Documents are never cut: one over the context gets an error instead.",
    "service_tier": "There is one tier: 'default'.",
    "modalities": "Only text is generated.",
    "max_chunks_per_doc": "Documents are never cut: one over the context gets an error instead.",
    "template": "Only the model's own chat template is used.",
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty", "seed", "stop", "num_predict"),
        "A name cannot keep it: send it with each request.",
    ),
    "adapters": "An adapter gets its name by llmbox lora add.",
    "files": "No model files are accepted over this API. llmbox adopt takes a folder of safetensors.",
    "quantize": "Weights are quantized on the box: llmbox quantize, or --quant at load.",
    "modelfile": "Its instructions have fields of their own: 'from', 'system' and 'parameters'.",
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
    """Refuse the first field that this build cannot honor. Raises ApiError 400 with `param`.

    `inside`: of the field that holds `request`, with a dot at its end.
    """
    for name in _refusable(type(request)):
        value = getattr(request, name)
        if value is not None and not _harmless(name, value):
            reason = _REASONS.get(name, "Leave it out.")
            raise unsupported_parameter(
                inside + name, f"The value of '{inside}{name}' is not supported. {reason}"
            )


def unknown_fields(kind: type[msgspec.Struct], plain: dict[str, Any], inside: str = "") -> list[str]:
    """Return warnings for fields that `kind` does not have."""
    return [
        f"Unknown field '{inside}{name}' was ignored."
        for name in plain
        if name not in kind.__struct_encode_fields__
    ]


@cache
def _refusable(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(name for name in kind.__struct_fields__ if hints[name] in (Later, Never))


def _harmless(name: str, value: Any) -> bool:
    return any(type(value) is type(known) and value == known for known in HARMLESS.get(name, ()))


_ADAPTER = "An adapter that was added (llmbox lora add) is named in 'model'."
_SAMPLER = "This sampling method is not supported. Supported: 'temperature', 'top_k', 'top_p' and 'min_p'."
_BEAMS = "Beam search is not supported."
_PROCESSOR = "Custom logits processors are not run. Use 'logit_bias', 'bad_words' or 'allowed_token_ids'."
_SHAPE = "Use 'response_format' or 'structured_outputs'."
_MEDIA = "Only text input is supported."
_ROUTER = "Fallback models are not supported: name the model to use."
_LENGTH = "Use 'max_tokens' and 'min_tokens'."
FOREIGN: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    **dict.fromkeys(("lora", "adapters"), (_ADAPTER, ([], {}))),
    **dict.fromkeys(
        ("lora_request", "lora_path", "adapter", "adapter_id", "adapter_name"), (_ADAPTER, ("", {}))
    ),
    **dict.fromkeys(
        (
            "mirostat",
            "dynatemp_range",
            "xtc_probability",
            "dry_multiplier",
            "top_a",
            "smoothing_factor",
            "epsilon_cutoff",
            "eta_cutoff",
        ),
        (_SAMPLER, (0,)),
    ),
    **dict.fromkeys(("typical_p", "typical", "tfs_z", "tfs"), (_SAMPLER, (1,))),
    "top_n_sigma": (_SAMPLER, (-1, 0)),
    "samplers": (_SAMPLER, ()),
    "sampler_seq": (_SAMPLER, ()),
    "watermark": (_SAMPLER, (False,)),
    "repeat_last_n": ("A penalty counts the whole context.", (-1,)),
    "repetition_penalty_range": ("A penalty counts the whole context.", (-1,)),
    "no_repeat_ngram_size": ("Use 'repetition_penalty'.", (0,)),
    "beam_width": (_BEAMS, (1,)),
    "num_beams": (_BEAMS, (1,)),
    "early_stopping": (_BEAMS, (False,)),
    "length_penalty": (_BEAMS, (0, 1)),
    **dict.fromkeys(("logits_processors", "logits_processor", "custom_logit_processor"), (_PROCESSOR, ([],))),
    **dict.fromkeys(("grammar", "ebnf", "regex", "json_schema", "structural_tag"), (_SHAPE, ("", {}))),
    "stop_regex": ("Use 'stop'.", ("", [])),
    "mm_processor_kwargs": (_MEDIA, ({},)),
    "multi_modal_data": (_MEDIA, ({},)),
    "prompt_embeds": (_MEDIA, ("", [])),
    "input_embeds": (_MEDIA, ([],)),
    "spaces_between_special_tokens": ("Tokens become text as the model's tokenizer has it.", (True,)),
    "detokenize": ("Answers are text; 'return_token_ids' gives the ids beside it.", (True,)),
    "max_new_tokens": (_LENGTH, ()),
    "min_new_tokens": (_LENGTH, (0,)),
    "models": (_ROUTER, ([],)),
    "transforms": ("Prompts are never cut: one over the context gets an error instead.", ([],)),
    "plugins": ("This server runs no tools of its own.", ([],)),
}
_ONLY_WITH: Final = {
    "repeat_last_n": ("repeat_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "repetition_penalty_range": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
"""Fields that change an answer only beside one of these."""
_NO_PENALTY: Final = (None, 0, 1)


def refuse_foreign(plain: Mapping[str, Any]) -> None:
    """Refuse fields of other servers, also inside Ollama's `options`. Raises ApiError 400 with `param`."""
    options = plain.get("options")
    for at, fields in ("", plain), ("options.", options if isinstance(options, dict) else {}):
        for name in FOREIGN.keys() & fields.keys():
            reason, harmless = FOREIGN[name]
            value = fields[name]
            if value is None or any(_same(value, each) for each in harmless):
                continue
            if at and name in _ONLY_WITH:
                continue  # Ollama's clients send its default, and are warned
            if name in _ONLY_WITH and all(fields.get(each) in _NO_PENALTY for each in _ONLY_WITH[name]):
                continue
            raise unsupported_parameter(
                f"{at}{name}", f"The value of '{at}{name}' is not supported. {reason}"
            )


def _same(value: Any, harmless: Any) -> bool:
    return type(value) in (type(harmless), float, int) and value == harmless
