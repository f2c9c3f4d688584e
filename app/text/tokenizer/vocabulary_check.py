"""Comparison of a tokenizer with the embedding of the weights beside it.

Embeddings are often padded to more rows than there are tokens, which is harmless. The other way round a
token has no row: prompts that hold it are refused, and the owner is warned when the model is loaded.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import TextModel


def vocabulary_warnings(text: "TextModel", rows: int) -> list[str]:
    """Return warnings of tokens without an embedding row. `rows`: of the embedding."""
    warnings = [
        f"the end token {id_} is not in the model's vocabulary of {rows} and is ignored"
        for id_ in text.eos_token_ids
        if id_ >= rows
    ]
    tokens = text.tokenizer.get_vocab_size(with_added_tokens=False)
    added = text.tokenizer.get_added_tokens_decoder()
    missing = {id_: token.content for id_, token in sorted(added.items()) if id_ >= rows}
    if tokens > rows:
        warnings.append(
            f"the tokenizer has {tokens} tokens and the embedding {rows} rows: they may not belong together, "
            "and prompts with tokens beyond are refused"
        )
    elif missing:
        first = next(iter(missing))
        warnings.append(
            f"added tokens of the tokenizer have no row in the embedding of {rows} rows: {len(missing)} from "
            f"{first} ({missing[first]}) on; prompts with one are refused"
        )
    template = text.chat_template or ""
    if written := [content for content in missing.values() if content in template]:
        warnings.append(f"the chat template writes {written[0]}, which has no row: chats are refused")
    return warnings
