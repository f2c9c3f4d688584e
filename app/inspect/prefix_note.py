"""Sentences about what the prefix cache had of a prompt, why it had no more, and where the prompt differs."""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from ..gateway.request_events import LiveRequest
from ..store.record import Content, RequestRecord

_BEFORE, _AFTER = 32, 48
"""Characters that are quoted before a difference, and of each text after it."""

_MORE = {
    "off": "The prefix cache is off for this model.",
    "prompt_logprobs": "prompt_logprobs was asked for: those come from computing the whole prompt.",
    "pooling": "A vector of all tokens was asked for: that comes from computing all of them.",
    "short": "The prompt has no whole block before its last token, so there was nothing to look up.",
    "new": "No prompt that begins like this one had been computed.",
    "namespace": "Another key, or another cache_salt, had computed the same beginning. "
    "KV blocks are never shared between keys.",
    "late": "More of it is on disk, which took too long to read it, so it was computed.",
    "damaged": "More of it was on disk, in a file that was damaged. It was removed and computed again.",
    "state": "More of it is in the KV cache, but the recurrent state there was not kept. It is kept "
    "now, so that the next prompt goes on from here.",
}
_BRIEF = {
    "off": "cache off",
    "prompt_logprobs": "computed for prompt_logprobs",
    "pooling": "computed for the mean",
    "short": "too short",
    "complete": "all found",
    "new": "nothing like it",
    "diverged": "went another way",
    "evicted": "evicted",
    "namespace": "another key's",
    "state": "no state kept there",
    "late": "disk too slow",
    "damaged": "damaged on disk",
}


def prefix_note(request: RequestRecord | LiveRequest) -> str:
    """Reason why the prefix cache had no more of the prompt. Empty where it was not queried."""
    if not request.prefix_end:
        return ""
    ends = request.prefix_end.split(",")
    looked_up, found = request.looked_up_tokens, request.cached_tokens
    share = f"Of {_tokens(request.prompt_tokens)} of prompt {looked_up} were looked up, {found} found"
    disk = request.disk_tokens
    share += f" ({found - disk} in memory, {disk} on disk). " if disk else ". "
    if len(ends) > 1:
        counts = Counter(_BRIEF.get(end, end) for end in ends)
        each = ", ".join(f"{count} {words}" for words, count in counts.most_common())
        return f"{share}{len(ends)} prompts: {each}."
    return (share if looked_up else "") + _why(ends[0], request.prompt_tokens - looked_up, found)


def _why(end: str, rest: int, found: int) -> str:
    if end == "complete":
        return (
            f"It had all of them. The last {_tokens(rest)} are always computed: it holds whole blocks only, "
            "and the answer begins with the last token's block."
        )
    if end == "diverged":
        return f"The first {_tokens(found)} are shared with an earlier prompt; after them this one differs."
    if end == "evicted":
        where = f"What follows the first {_tokens(found)}" if found else "The beginning"
        return f"{where} had been in the cache and was evicted."
    return _MORE.get(end, end)


def _tokens(count: int) -> str:
    return f"{count:,} token" if count == 1 else f"{count:,} tokens"


def describe_difference(content: Content, earlier: Sequence[tuple[str, Content]]) -> str:
    """Name the first text in which a prompt differs from the earlier one that shares most with it.

    `earlier`: request ids and contents, newest first. An answer continues its prompt. Empty where one of both
    only ends before the other, and where there is none.
    """
    texts = {request_id: text for request_id, other in earlier if (text := _conversation(other))}
    if len(content.prompts) != 1 or not texts:
        return ""
    prompt = content.prompts[0]
    request_id = max(texts, key=lambda each: _shared(prompt, texts[each]))
    text = texts[request_id]
    shared = _shared(prompt, text)
    if shared in {len(text), len(prompt)}:
        return ""
    before, here, there = (
        json.dumps(part, ensure_ascii=False)
        for part in (
            prompt[max(0, shared - _BEFORE) : shared],
            prompt[shared : shared + _AFTER],
            text[shared : shared + _AFTER],
        )
    )
    place = f"after {before}" if shared else "at the beginning"
    return f" It differs from request {request_id} first {place}: here {here}, there {there}."


def _shared(a: str, b: str) -> int:
    """Count the characters at the beginning of both, by bisection: prompts have up to 256,000."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda size: a[:size] != b[:size])


def _conversation(content: Content) -> str:
    """Prompt and answer of a request, as far as both are whole; empty for several prompts."""
    if len(content.prompts) != 1:
        return ""
    has_answer = len(content.outputs) == 1 and not content.was_cut("prompt")
    return content.prompts[0] + (content.outputs[0] if has_answer else "")
