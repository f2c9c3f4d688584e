"""Log-probabilities in the shapes of the dialects."""

from collections.abc import Sequence

from llmbox.engine.ipc.messages import TokenLogprobs

from ...gateway.generation import TokenEntry
from ...text.tokenizer.token_bytes import TokenBytes
from .response_types import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""Stand-in for minus infinity, which JSON does not have (OpenAI's value)."""


def token_label(data: bytes, prefix: str = "") -> str:
    r"""Return a token's text. Bytes that are no whole characters are written `\xe4\xbd`, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    entries: Sequence[TokenEntry], tokens: TokenBytes, *, as_ids: bool | None = False
) -> ChatLogprobs:
    """Build the chat shape. `as_ids`: tokens are named by their ids, `token_id:N`; `bytes` stay those of
    their texts.
    """
    return ChatLogprobs([_chat_entry(entry, tokens, as_ids=bool(as_ids)) for entry in entries])


def completion_logprobs(
    entries: Sequence[TokenEntry], tokens: TokenBytes, offset: int, top: int, *, as_ids: bool | None = False
) -> CompletionLogprobs:
    """Build the completion shape. `offset` is where the answer begins in the returned text, `top` the number
    of alternatives requested.
    """
    result = CompletionLogprobs()
    for entry in entries:
        id_, start = entry.logprobs.token_id, offset + entry.start
        append_completion_entry(result, entry.logprobs, id_, start, tokens, top, as_ids=as_ids)
    return result


def append_completion_entry(
    result: CompletionLogprobs,
    logprobs: TokenLogprobs | None,
    token_id: int,
    offset: int,
    tokens: TokenBytes,
    top: int,
    *,
    as_ids: bool | None = False,
) -> None:
    """Append one token. The chosen token is always among the alternatives. The first token of a prompt has no
    logprobs: None.
    """
    label = _id_label if as_ids else lambda id_: _label(tokens.inner(id_))
    result.text_offset.append(offset)
    result.tokens.append(label(token_id))
    if logprobs is None:
        result.token_logprobs.append(None)
        result.top_logprobs.append(None)
        return
    best = {label(id_): _finite(value) for id_, value in reversed(logprobs.top[:top])}
    chosen = _finite(logprobs.logprob)
    result.token_logprobs.append(chosen)
    result.top_logprobs.append(dict(reversed(best.items())) | {label(token_id): chosen})


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


def _chat_entry(entry: TokenEntry, tokens: TokenBytes, *, as_ids: bool) -> TokenLogprob:
    def label(id_: int, data: bytes) -> str:
        return _id_label(id_) if as_ids else token_label(data)

    ranked = ((id_, tokens.inner(id_), value) for id_, value in entry.logprobs.top)
    top = [TopLogprob(label(id_, data), _finite(value), list(data)) for id_, data, value in ranked]
    chosen = label(entry.logprobs.token_id, entry.data)
    return TokenLogprob(chosen, _finite(entry.logprobs.logprob), list(entry.data), top)


def _id_label(token_id: int) -> str:
    return f"token_id:{token_id}"


def _label(data: bytes) -> str:
    return token_label(data, "bytes:")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
