"""Fields of other servers that would change an answer and mean nothing here: refused, never ignored.

Other unknown fields become warnings. Values that ask for what happens anyway pass.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ...errors import ApiError

_ADAPTER = "Adapters are not applied to requests: merge one into a model's weights, and load that."
_SAMPLER = "This way of choosing tokens is not there: 'temperature', 'top_k', 'top_p' and 'min_p' are."
_BEAMS = "Tokens are drawn one by one: there is no beam search."
_PROCESSOR = "No code of a caller's is run: 'logit_bias', 'bad_words' and 'allowed_token_ids' are there."
_SHAPE = "Use 'response_format' or 'structured_outputs'."
_MEDIA = "Only text is read."
_ROUTER = "The model that is named answers, or none."
_LENGTH = "Use 'max_tokens' and 'min_tokens'."
_FIELDS: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
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


def refuse_foreign(plain: Mapping[str, Any], places: tuple[str, ...] = ("options",)) -> None:
    """Refuse fields of other servers. `places`: of further fields inside `plain`. Raises ApiError 400 with
    `param`.
    """
    for at, fields in _tables(plain, places):
        for name in _FIELDS.keys() & fields.keys():
            reason, harmless = _FIELDS[name]
            value = fields[name]
            if value is None or any(_same(value, each) for each in harmless):
                continue
            if at and name in _ONLY_WITH:
                continue  # Ollama's clients send its default, and are warned
            if name in _ONLY_WITH and all(fields.get(each) in _NO_PENALTY for each in _ONLY_WITH[name]):
                continue
            raise ApiError(
                400,
                f"The value of '{at}{name}' is not supported. {reason}",
                code="unsupported_parameter",
                param=f"{at}{name}",
            )


def _tables(plain: Mapping[str, Any], places: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", plain
    for place in places:
        if isinstance(inner := plain.get(place), dict):
            yield f"{place}.", inner


def _same(value: Any, harmless: Any) -> bool:
    return type(value) in (type(harmless), float, int) and value == harmless
