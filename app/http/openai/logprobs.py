"""Log-probabilities in the dialects' shapes."""

from collections.abc import Sequence

from llmbox.engine.messages import TokenLogprobs

from ...gateway.generation import TokenEntry
from ...text.token_bytes import TokenBytes
from .responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""What stands for minus infinity, which JSON does not have (OpenAI's value)."""


def token_label(data: bytes, prefix: str = "") -> str:
    r"""A token's text; bytes that are no whole characters are written `\xe4\xbd`, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: Sequence[TokenEntry], tokens: TokenBytes) -> ChatLogprobs:
    return ChatLogprobs([_chat_entry(entry, tokens) for entry in entries])


def completion_logprobs(
    entries: Sequence[TokenEntry], tokens: TokenBytes, offset: int, top: int
) -> CompletionLogprobs:
    """`offset` is where the answer begins in the returned text, `top` how many alternatives were asked."""
    result = CompletionLogprobs()
    for entry in entries:
        append_completion_entry(result, entry.logprobs, entry.data, offset + entry.start, tokens, top)
    return result


def append_completion_entry(
    result: CompletionLogprobs,
    logprobs: TokenLogprobs | None,
    data: bytes,
    offset: int,
    tokens: TokenBytes,
    top: int,
) -> None:
    """The chosen token is always among the alternatives. The first token of all has no logprobs: None."""
    result.text_offset.append(offset)
    result.tokens.append(_label(data))
    if logprobs is None:
        result.token_logprobs.append(None)
        result.top_logprobs.append(None)
        return
    best = {_label(tokens.inner(id_)): _finite(value) for id_, value in reversed(logprobs.top[:top])}
    chosen = _finite(logprobs.logprob)
    result.token_logprobs.append(chosen)
    result.top_logprobs.append(dict(reversed(best.items())) | {_label(data): chosen})


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], tokens: TokenBytes, prompt: Sequence[int], top: int
) -> PromptLogprobs:
    return [
        None if entry is None else _prompt_entry(entry, tokens, token_id, top)
        for entry, token_id in zip(entries, prompt, strict=True)
    ]


def _prompt_entry(
    entry: TokenLogprobs, tokens: TokenBytes, token_id: int, top: int
) -> dict[str, PromptTokenLogprob]:
    ranked = {id_: (value, rank) for rank, (id_, value) in enumerate(entry.top[:top], 1)}
    ranked[token_id] = (entry.logprob, entry.rank)
    return {
        str(id_): PromptTokenLogprob(_finite(value), rank, token_label(tokens.inner(id_)))
        for id_, (value, rank) in ranked.items()
    }


def _chat_entry(entry: TokenEntry, tokens: TokenBytes) -> TokenLogprob:
    top = [_top(tokens.inner(id_), value) for id_, value in entry.logprobs.top]
    return TokenLogprob(token_label(entry.data), _finite(entry.logprobs.logprob), list(entry.data), top)


def _top(data: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(token_label(data), _finite(logprob), list(data))


def _label(data: bytes) -> str:
    return token_label(data, "bytes:")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
