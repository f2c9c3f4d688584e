"""Answers in Ollama's shape: lines of JSON, or one object."""

from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ...control.library import LocalModelFacts
from ...errors import ApiError
from ...gateway.gateway import Gateway
from ...gateway.generation import Delta, TokenEntry
from ...gateway.open_request import OpenRequest
from ...text.output.format_table import recognize_format
from ...text.output.output_parser import ParsedOutput, read_arguments
from ...util.formatting import rfc3339
from ...util.threads import off_loop
from ..openai.sampling import chat_logprobs
from ..server.errors import encode_error
from ..server.sse import SseOptions
from .calls import OllamaCall

Kind = Literal["chat", "generate"]


def line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def error_line(error: ApiError) -> bytes:
    return encode_error(error, "/api/chat") + b"\n"


LINES = SseOptions(last=b"", error=error_line, comment=b"", content_type=b"application/x-ndjson")


class AnswerWriter:
    """Writer of one answer in the shape of its route."""

    def __init__(self, kind: Kind, model: str, opened: OpenRequest, call: OllamaCall) -> None:
        self._kind: Kind = kind
        self._opened, self._call = opened, call
        self._head = {"model": model, "created_at": rfc3339(opened.timeline.created)}
        self._entries: list[TokenEntry] = []
        """Log-probabilities that no line has held yet."""

    def note(self, delta: Delta) -> None:
        if self._call.has_logprobs:
            self._entries += delta.entries

    def part(self, parts: ParsedOutput) -> dict[str, Any]:
        thoughts = parts.reasoning if self._call.parsing.includes_reasoning else ""
        said: dict[str, Any] = {"thinking": thoughts} if thoughts else {}
        if self._kind == "generate":
            return {**self._head, "response": parts.content, **said, "done": False} | self._logprobs()
        if parts.calls:
            said["tool_calls"] = [
                {"function": {"name": call.name, "arguments": read_arguments(call.arguments)}}
                for call in parts.calls
            ]
        message = {"role": "assistant", "content": parts.content, **said}
        return {**self._head, "message": message, "done": False} | self._logprobs()

    def end(self, parts: ParsedOutput) -> dict[str, Any]:
        """Build the last object. Times are nanoseconds."""
        clock, usage = self._opened.timeline, self._opened.usage_now()
        begun = clock.scheduled if clock.scheduled is not None else clock.submitted
        first = clock.first_token if clock.first_token is not None else begun
        last = clock.last_token if clock.last_token is not None else first
        data = {
            **self.part(parts),
            "done": True,
            "done_reason": self._opened.sequences[0].finish_reason,
            "total_duration": _nanoseconds(last - clock.began),
            "load_duration": _nanoseconds(self._call.generation.clock.model_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - begun),
            "eval_count": usage.output_tokens,
            # Clients divide by it, and one token has no time between the first and the last.
            "eval_duration": max(1, _nanoseconds(last - first)),
        }
        warnings = self._call.prepared.warnings_at_end(self._opened)
        return data | ({"warnings": warnings} if warnings else {})

    def _logprobs(self) -> dict[str, Any]:
        if not self._entries:
            return {}
        result = chat_logprobs(self._entries, self._call.generation.model.text.tokens).content
        self._entries = []
        return {"logprobs": result}


async def complete(gateway: Gateway, call: OllamaCall, kind: Kind, model: str) -> dict[str, Any]:
    parser = call.parsing.parser()
    with gateway.open(call.generation) as opened:
        writer = AnswerWriter(kind, model, opened, call)
        pieces = []
        async for delta in opened.deltas():
            writer.note(delta)
            pieces.append(delta.text)
    is_cut = opened.sequences[0].finish_reason == "length"
    parts = parser.parse_whole("".join(pieces), is_cut=is_cut)
    tokens = opened.usage.output_tokens if call.has_logprobs else 0
    return await off_loop(tokens, lambda: writer.end(parts))


async def stream(gateway: Gateway, call: OllamaCall, kind: Kind, model: str) -> AsyncGenerator[bytes, None]:
    parser = call.parsing.parser()
    with gateway.open(call.generation) as opened:
        writer = AnswerWriter(kind, model, opened, call)
        async for delta in opened.deltas():
            writer.note(delta)
            parts = parser.push(delta.text)
            if parts.reasoning or parts.content or parts.calls:
                yield line(writer.part(parts))
    rest = parser.finish(is_cut=opened.sequences[0].finish_reason == "length")
    if rest.reasoning or rest.content or rest.calls:
        yield line(writer.part(rest))
    yield line(writer.end(ParsedOutput()))


def build_empty_answer(
    kind: Kind, model: str, now: float, reason: Literal["load", "unload"], warnings: list[str]
) -> dict[str, Any]:
    """Build the answer to a request without a prompt."""
    said: dict[str, Any] = (
        {"response": ""} if kind == "generate" else {"message": {"role": "assistant", "content": ""}}
    )
    data = {"model": model, "created_at": rfc3339(now), **said, "done": True, "done_reason": reason}
    return data | ({"warnings": warnings} if warnings else {})


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


_OPTION_NAMES = {"repetition_penalty": "repeat_penalty"}


class OllamaModelDetails(Struct, kw_only=True):
    parent_model: str = ""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelEntry(Struct, kw_only=True):
    name: str
    model: str
    modified_at: str
    size: int
    """Bytes on disk."""
    digest: str
    details: OllamaModelDetails


class OllamaModelList(Struct):
    models: list[OllamaModelEntry]


class OllamaRunningModel(Struct, kw_only=True):
    name: str
    model: str
    size: int
    """Bytes of memory."""
    digest: str
    details: OllamaModelDetails
    expires_at: str
    """Time when the model leaves memory if no request comes; centuries ahead for one that stays."""
    size_vram: int
    """Bytes of `size` that are on GPUs."""
    context_length: int
    """Tokens of prompt and answer together."""


class RunningModels(Struct):
    models: list[OllamaRunningModel]


class OllamaShowResponse(Struct, kw_only=True):
    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    template: str
    """Jinja, not Go's."""
    parameters: str
    system: str = ""


class OllamaVersion(Struct):
    version: str


def details_of(card: LocalModelFacts, weights: str = "") -> OllamaModelDetails:
    """Build a model's details. `weights`: the data type in memory, where that differs from the files."""
    family = card.config.model_type if card.config is not None else ""
    return OllamaModelDetails(
        family=family,
        families=[family] if family else [],
        parameter_size=_size(card.parameters),
        quantization_level=(weights or card.stored_as).upper(),
    )


def model_info(card: LocalModelFacts, context: int | None) -> dict[str, Any]:
    """Build `model_info` with GGUF's keys. `context` is the length served here, which may be less than the
    model's.
    """
    config = card.config
    if config is None:
        return {}
    kind = config.model_type
    return {
        "general.architecture": kind,
        "general.parameter_count": config.num_parameters,
        f"{kind}.context_length": context or config.default_context,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.block_count": config.num_layers,
        f"{kind}.attention.head_count": config.num_heads,
        f"{kind}.attention.head_count_kv": config.num_kv_heads,
        f"{kind}.attention.key_length": config.head_dim,
        f"{kind}.attention.value_length": config.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": config.rope.theta,
        f"{kind}.vocab_size": config.vocab_size,
    }


def capabilities(card: LocalModelFacts) -> list[str]:
    if card.for_vectors:
        return ["embedding"]
    found = ["completion"]
    format_ = recognize_format(card.template)
    if format_.tools is not None:
        found.append("tools")
    if format_.reasoning is not None:
        found.append("thinking")
    if card.sees:
        found.append("vision")
    return found


def parameters(values: dict[str, float], context: int | None) -> str:
    """Format parameters one a line, as in a Modelfile."""
    data: dict[str, float] = {} if context is None else {"num_ctx": context}
    data |= {_OPTION_NAMES.get(name, name): value for name, value in values.items()}
    return "\n".join(f"{name:<30} {value:g}" for name, value in data.items())


def _size(parameters: int | None) -> str:
    if parameters is None:
        return ""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
