"""End-of-text ids: those that a model's files declare, and which of these declarations are ignored."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from llmbox.engine.errors import ModelError

from ..output.format_table import recognize_format

END_OF_TURN: Final = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>",
    "<|endofturn|>", "<|eot|>", "<|return|>", "<|call|>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "[e~[",
)  # fmt: skip
"""Turn ends that models emit although their configs may not list them; taken if the template writes them."""
MOST: Final = 64
"""Each request carries them all. No known model declares more than a handful."""


def declared_ids(configs: Mapping[str, dict[str, Any]]) -> tuple[list[int], list[str]]:
    """Return the `eos_token_id` values of all files, and a warning for each that is no token id. Raises
    ModelError.
    """
    ids: list[int] = []
    warnings: list[str] = []
    for file, config in configs.items():
        declared = config.get("eos_token_id")
        listed = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if len(listed) > MOST:
            raise ModelError(f"{file}: eos_token_id lists {len(listed)} ids, at most {MOST} are taken")
        for value in listed:
            if type(value) is int and 0 <= value < 2**31:
                ids.append(value)
            else:
                warnings.append(f"{file}: eos_token_id {str(value)[:40]} is no token id and is ignored")
    return ids, warnings


def end_token_ids(
    tokenizer: Tokenizer, special_tokens: Mapping[str, str], template: str | None, declared: Sequence[int]
) -> tuple[int, ...]:
    """Return every id that ends an answer, in a fixed order: declared ones, the named one, those of the
    template.
    """
    names = [special_tokens.get("eos_token", "")]
    harmony = recognize_format(template).is_harmony  # there `<|end|>` ends a message, not the turn
    names += [
        name for name in END_OF_TURN if template and name in template and not (harmony and name == "<|end|>")
    ]
    named = (tokenizer.token_to_id(name) for name in names)
    return tuple(dict.fromkeys((*declared, *(id_ for id_ in named if id_ is not None))))
