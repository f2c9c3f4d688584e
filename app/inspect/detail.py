"""Details of one request, as far as its reader may see them, with the reason why the prefix cache had no more
of its prompt; the same request as code.
"""

import json
import shlex
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..control.controller import DaemonController
from ..errors import ApiError
from ..security.security import Identity
from ..services import Services
from ..store.record import Content, LiveRequest, RequestRecord
from ..util.threads import off_loop

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
    tiers = {"on disk": request.disk_tokens, "in main memory": request.host_tokens}
    others = "".join(f", {count} {where}" for where, count in tiers.items() if count)
    near = "on the GPU" if request.host_tokens else "in memory"
    share += f" ({found - sum(tiers.values())} {near}{others}). " if others else ". "
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


PROMPT = "…"
_CHATS = ("chat", "messages", "responses", "generate")
"""Routes of chats and of dialects that are translated into chats."""
_OF_THE_CLIENT = {
    "model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "max_tokens",
    "max_completion_tokens", "seed", "presence_penalty", "frequency_penalty", "n", "stop", "logit_bias",
    "logprobs", "top_logprobs", "echo", "best_of", "user", "metadata", "input", "dimensions",
    "encoding_format",
}  # fmt: skip
"""Parameters of the openai package; others go into `extra_body`."""
_COUNTED = ("stop", "bad_words", "logit_bias", "allowed_token_ids", "stop_token_ids")


def as_curl(url: str, record: RequestRecord, content: Content | None = None) -> str:
    """Format the request as a curl command."""
    body = json.dumps(body_of(record, content), ensure_ascii=False, indent=2)
    return (
        f"curl {url}{_path(record)} \\\n"
        "  -H 'Authorization: Bearer '\"$LLMBOX_API_KEY\" \\\n"
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(body)}"
    )


def as_python(url: str, record: RequestRecord, content: Content | None = None) -> str:
    """Format the request as a script with OpenAI's Python package."""
    call = "chat.completions" if is_chat(record) else "embeddings" if is_pooled(record) else "completions"
    body = body_of(record, content)
    extra = {name: value for name, value in body.items() if name not in _OF_THE_CLIENT}
    lines = [f"    {name}={_python(value)}," for name, value in body.items() if name not in extra]
    lines += [f"    extra_body={_python(extra)},"] if extra else []
    return "\n".join(
        [
            "import os",
            "",
            "from openai import OpenAI",
            "",
            f'client = OpenAI(base_url="{url}/v1", api_key=os.environ["LLMBOX_API_KEY"])',
            f"answer = client.{call}.create(",
            *lines,
            ")",
        ]
    )


def body_of(record: RequestRecord, content: Content | None) -> dict[str, Any]:
    """Request body for the same answer: the request as it was, with the seed that was drawn for it."""
    if content is None or not content.is_whole:
        body = _from_record(record)
    else:
        sent = json.loads(content.body)
        body = {"model": sent.pop("model", None) or record.model, **sent}
    if record.seed is not None:
        body["seed"] = record.seed
    return body


def is_chat(record: RequestRecord) -> bool:
    """Return whether it is a chat. Requests of other dialects are kept as the chat requests that they were
    translated into.
    """
    return any(name in record.endpoint for name in _CHATS)


def is_pooled(record: RequestRecord) -> bool:
    """Return whether embeddings were requested."""
    return "embed" in record.endpoint or is_ranked(record)


def is_ranked(record: RequestRecord) -> bool:
    """Return whether documents were reranked."""
    return "rerank" in record.endpoint


def _path(record: RequestRecord) -> str:
    if is_ranked(record):
        return "/v1/rerank"
    if is_pooled(record):
        return "/v1/embeddings"
    return "/v1/chat/completions" if is_chat(record) else "/v1/completions"


def _from_record(record: RequestRecord) -> dict[str, Any]:
    if is_ranked(record):
        return {"model": record.model, "query": PROMPT, "documents": [PROMPT]}
    if is_pooled(record):
        return {"model": record.model, "input": PROMPT}
    params = json.loads(record.params)
    for counted in _COUNTED:
        params.pop(counted, None)  # the log has only their number
    body: dict[str, Any] = {"model": record.model}
    if is_chat(record):
        body["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        body["prompt"] = PROMPT
    body |= {name: value for name, value in params.items() if isinstance(value, int | float | str)}
    if record.n > 1:
        body["n"] = record.n
    if record.stream:
        body["stream"] = True
    return body


def _python(value: Any, indent: str = "    ") -> str:
    """Format JSON values as Python literals. Lists and objects of more than numbers take several lines."""
    inner = indent + "    "
    if isinstance(value, dict):
        items = [
            f"{json.dumps(name, ensure_ascii=False)}: {_python(each, inner)}" for name, each in value.items()
        ]
        return _lines("{", items, "}", indent)
    if isinstance(value, list) and any(isinstance(each, dict | list | str) for each in value):
        return _lines("[", [_python(each, inner) for each in value], "]", indent)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _lines(opening: str, items: list[str], closing: str, indent: str) -> str:
    inner = "".join(f"{indent}    {item},\n" for item in items)
    return f"{opening}\n{inner}{indent}{closing}" if items else opening + closing


def content_note(record: RequestRecord, content: Content | None, days: float, *, foreign: bool) -> str:
    """Reason why prompt and answer are not shown, or which parts were cut. Empty if everything is there.

    `foreign`: there is content, of another key than the reader's.
    """
    if foreign:
        return (
            "Prompt and answer belong to another API key. The owner of this box reads them with "
            "llmbox requests show on the box itself, or signed in to the panel by its link."
        )
    if content is not None:
        return " ".join(
            f"Of the {name} {kept:,} of {whole:,} bytes were kept (requests.content_bytes)."
            for name, kept, whole in content.cut_parts()
        )
    if record.content == "dropped":
        return "Prompt and answer could not be kept: the disk or the queue of the log was full."
    if record.content == "kept":
        return (
            f"Prompt and answer were kept and have been erased since: after {days:g} days, by a purge, or "
            "because the log reached its size (requests.max_bytes)."
        )
    if not record.fingerprint and record.error_code:
        return "The request was refused before it reached a model; nothing of it is kept."
    if record.key and not record.key.startswith("("):
        return f"The key {record.key} does not let prompts and answers be kept (key add --log-content)."
    return "Prompts and answers of callers without a key are not kept (the setting requests.log_content)."


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDetail:
    """Details of a request. Either `in_flight` or `request` is set. The notes are sentences, or empty."""

    in_flight: LiveRequest | None = None
    request: RequestRecord | None = None
    prefix_note: str = ""
    content: Content | None = None
    content_note: str = ""
    curl: str = ""
    python: str = ""


async def detail_of(control: DaemonController, identity: Identity, request_id: str) -> RequestDetail:
    """Collect the details of a request. Raises ApiError 404."""
    services = control.services
    live = next((each for each in services.gateway.in_flight() if each.id == request_id), None)
    if live is not None:
        return RequestDetail(in_flight=live, prefix_note=prefix_note(live))
    record, content, foreign = await find_logged(services, identity, request_id)
    days = services.request_log.keep.content_days
    return RequestDetail(
        request=record,
        prefix_note=prefix_note(record) + await _difference(services, record, content),
        content=content,
        content_note=content_note(record, content, days, foreign=foreign),
        curl=as_curl(control.running.url, record, content),
        python=as_python(control.running.url, record, content),
    )


async def _difference(services: Services, record: RequestRecord, content: Content | None) -> str:
    """Sentence that names the first text in which a prompt differs from the nearest earlier one. Empty where
    the reader may not see the prompt, or no earlier one of its owner was kept.
    """
    if content is None or record.prefix_end not in {"diverged", "new"}:
        return ""
    earlier = await services.request_log.earlier_contents(record)
    size = sum(len(prompt) for _, each in earlier for prompt in each.prompts)
    return await off_loop(size, lambda: describe_difference(content, earlier))


async def find_logged(
    services: Services, identity: Identity, request_id: str
) -> tuple[RequestRecord, Content | None, bool]:
    """Return (record, content that this reader may see, whether content is hidden). Raises ApiError 404."""
    found = await services.request_log.get_with_content(request_id)
    if found is None:
        raise ApiError(
            404,
            f"No request {request_id!r} is known. `llmbox requests` lists them.",
            "request_not_found",
            "request_id",
        )
    record, content = found
    if content is None or services.security.may_read(identity, content.owner):
        return record, content, False
    return record, None, True
