"""Answer types with exactly OpenAI's keys. UNSET fields are left out: llmbox's own appear only when they
carry information.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from ...gateway.generation import TokenUsage

PromptLogprobs = list[dict[str, "PromptTokenLogprob"] | None]


class PromptTokensDetails(Struct):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(Struct):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class CompletionUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, usage: TokenUsage, reasoning_tokens: int = 0) -> "CompletionUsage":
        return cls(
            usage.prompt_tokens,
            usage.output_tokens,
            usage.prompt_tokens + usage.output_tokens,
            PromptTokensDetails(usage.cached_tokens),
            CompletionTokensDetails(reasoning_tokens),
        )


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class PromptTokenLogprob(Struct):
    """Entry in vLLM's shape, keyed by token id."""

    logprob: float
    rank: int | None
    decoded_token: str


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)


class Extras(Struct, kw_only=True):
    """llmbox's own fields, at the top of an answer (of the last chunk when streaming)."""

    seed: int | UnsetType = UNSET
    """Drawn because the request had none; sending it gives the same answer again."""
    warnings: list[str] | UnsetType = UNSET


class CalledFunction(Struct):
    name: str
    arguments: str


class CalledCustom(Struct):
    name: str
    input: str


class ChatToolCall(Struct, kw_only=True):
    """Tool call with `function` or `custom`, according to its type."""

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    annotations: list[Any] = field(default_factory=list)
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """Reasoning before the answer, for models that write it; `reasoning` is the same."""
    reasoning: str | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Extras, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    service_tier: str = "default"
    system_fingerprint: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class CustomDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    input: str


class ToolCallDelta(Struct, kw_only=True):
    """Part of a tool call: `id`, `type` and the name come once, then pieces of the arguments or of
    the input.
    """

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Extras, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str = "default"
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Log-probabilities of the prompt, sent with the first tokens."""


class CompletionChoice(Struct, kw_only=True):
    """One choice of a completion, or of a chunk, where `finish_reason` may be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Extras, kw_only=True):
    """A completion, or a chunk of one, where `usage` depends on `stream_options`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage | UnsetType | None = UNSET
    system_fingerprint: str


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["llmbox"] = "llmbox"
    context_window: int
    """Maximum prompt + output in tokens: guaranteed while the model is loaded, otherwise the value if it were
    loaded alone.
    """
    max_model_len: int
    """The same, under vLLM's name."""
    state: Literal["loaded", "loading", "on_disk"] = "loaded"
    """A request that names one on disk loads it first."""
    parent: str | None = None
    """Base model of a LoRA adapter."""


class DeletedModel(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(Struct, kw_only=True):
    prompt: str


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class RankedDocument(Struct):
    text: str


class RerankResult(Struct, kw_only=True):
    index: int
    """Place of the document among those that were sent."""
    relevance_score: float
    """Relevance from 0 to 1."""
    document: RankedDocument | UnsetType = UNSET


class RerankResponse(Struct, kw_only=True):
    """Ranked documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    warnings: list[str] | UnsetType = UNSET


class Embedding(Struct, kw_only=True):
    index: int
    embedding: list[float] | str
    """Base64 of little-endian float32, where that was asked for."""
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct, kw_only=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
    warnings: list[str] | UnsetType = UNSET
