"""Fill-in-the-middle (FIM) prompts: the model writes the gap between a prefix and a suffix.

Each family marks the parts with special tokens of its tokenizer. The gap is written after the last
mark, and ends with an end-of-text token. Orders: prefix, suffix, middle (Bavarian et al., "Efficient Training
of Language Models to Fill in the Middle", 2022), or suffix first, as Mistral's models and Seed-Coder were
trained.
"""

from dataclasses import dataclass

from ..errors import ApiError
from .tokenizer.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class FimTokens:
    prefix: str
    suffix: str
    middle: str
    """Mark before the gap. Empty: the prefix is the last part, and the gap follows it."""
    suffix_first: bool = False


FAMILIES = (
    FimTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite
    FimTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StableCode, Granite Code
    FimTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimTokens("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek-Coder
    FimTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    FimTokens("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX4
    FimTokens("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    FimTokens("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)
ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<|file_separator|>", "<file_sep>",
    "<|repo_name|>", "▁<EOT>", "<\uff5cend▁of▁sentence\uff5c>",
)  # fmt: skip
"""Tokens that end a gap, besides the model's own end tokens."""
_MASK = "☺"
"""Character put before a continued text, so that the tokenizer adds no space before it."""


def fim_prompt(text: TextModel, prefix: str, suffix: str, *, add_special_tokens: bool = True) -> list[int]:
    """Build the prompt's token ids. Raises ApiError 400 for a model without FIM tokens."""
    family = fim_tokens(text)
    before = text.encode(prefix, add_special_tokens=False) if prefix else []
    marked = (
        [*_ids(text, family.prefix), *before],
        [*_ids(text, family.suffix), *_encode_inside(text, suffix)],
    )
    first, second = reversed(marked) if family.suffix_first else marked
    start = _start(text) if add_special_tokens else []
    return [*start, *first, *second, *_ids(text, family.middle)]


def fim_tokens(text: TextModel) -> FimTokens:
    """Return the model's FIM tokens. Raises ApiError 400 for a model without them."""
    for family in FAMILIES:
        names = [name for name in (family.prefix, family.suffix, family.middle) if name]
        if all(text.tokenizer.token_to_id(name) is not None for name in names):
            return family
    raise ApiError(
        400,
        "This model does not support fill-in-the-middle: its tokenizer has no tokens for a suffix. "
        "Qwen2.5-Coder, CodeLlama, StarCoder, DeepSeek-Coder and Codestral do. Leave 'suffix' out.",
        code="suffix_not_supported",
        param="suffix",
    )


def fim_stop_ids(text: TextModel) -> tuple[int, ...]:
    """Return the ids that end a gap."""
    family = fim_tokens(text)
    names = [*ENDS, *(name for name in (family.prefix, family.suffix, family.middle) if name)]
    ids = (text.tokenizer.token_to_id(name) for name in names)
    return tuple(id_ for id_ in ids if id_ is not None)


def _ids(text: TextModel, name: str) -> list[int]:
    id_ = text.tokenizer.token_to_id(name) if name else None
    return [] if id_ is None else [id_]


def _start(text: TextModel) -> list[int]:
    """Return the ids that the tokenizer puts before a text: beginning-of-text, where a model has one."""
    plain = text.encode("a", add_special_tokens=False)
    whole = text.encode("a")
    return next((whole[:n] for n in range(len(whole)) if whole[n : n + len(plain)] == plain), [])


def _encode_inside(text: TextModel, suffix: str) -> list[int]:
    """Encode a text as if in the middle of another: some tokenizers put a space before every text."""
    plain = text.encode(suffix, add_special_tokens=False)
    if text.decode(plain, begins=False, skip_special=False) == suffix:
        return plain
    mask = text.encode(_MASK, add_special_tokens=False)
    masked = text.encode(_MASK + suffix, add_special_tokens=False)
    return masked[len(mask) :] if masked[: len(mask)] == mask else plain
