"""Types and bounds of Ollama's fields."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from ...errors import missing_parameter
from ..openai.request_types import (
    Count,
    Name,
    Never,
    NoEffect,
    Penalty,
    Probability,
    RepetitionPenalty,
    Seed,
    Temperature,
    Tool,
    ToolName,
    TopLogprobs,
    TopP,
)


class OllamaOptions(Struct, kw_only=True):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    min_p: Probability | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    num_predict: Annotated[int, Meta(ge=-2, lt=2**31)] | None = None
    """Upper bound of the answer's tokens: an answer ends with the context. Below 1: what the
    context leaves.
    """
    num_ctx: NoEffect = None
    """The context window is set when the model is loaded."""
    repeat_last_n: NoEffect = None
    """Penalties count the whole context, as with -1."""
    mirostat: Never = None
    tfs_z: Never = None
    typical_p: Never = None
    penalize_newline: NoEffect = None
    mirostat_tau: NoEffect = None
    mirostat_eta: NoEffect = None
    num_keep: NoEffect = None
    num_batch: NoEffect = None
    num_gpu: NoEffect = None
    num_thread: NoEffect = None
    main_gpu: NoEffect = None
    numa: NoEffect = None
    low_vram: NoEffect = None
    f16_kv: NoEffect = None
    logits_all: NoEffect = None
    vocab_only: NoEffect = None
    use_mmap: NoEffect = None
    use_mlock: NoEffect = None
    embedding_only: NoEffect = None
    draft_num_predict: NoEffect = None


class OllamaFunctionCall(Struct, kw_only=True):
    name: ToolName
    arguments: dict[str, Any]


class Call(Struct, kw_only=True):
    function: OllamaFunctionCall


class OllamaMessage(Struct, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[str] | None = None
    """Images in base64."""
    tool_calls: list[Call] | None = None
    tool_name: str | None = None


class OllamaGenerateFields(Struct, kw_only=True):
    model: Name
    options: OllamaOptions | None = None
    stream: bool | None = None
    """Absent: true, as with Ollama."""
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    """Log-probabilities of each token of the answer."""
    top_logprobs: TopLogprobs | None = None
    truncate: NoEffect = None
    """Prompts are never cut."""
    shift: NoEffect = None
    """An answer ends with the context."""
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    keep_alive: float | str | None = None
    """Time that the model stays loaded without use, in seconds or as a duration (`5m`). 0: it is unloaded at
    once; negative: it stays."""


class ChatRequest(OllamaGenerateFields, kw_only=True):
    """Chat request. Without messages the model is loaded, or unloaded with `keep_alive: 0`."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class GenerateRequest(OllamaGenerateFields, kw_only=True):
    """Generate request. Without a prompt the model is loaded, or unloaded with `keep_alive: 0`."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    """Text after the gap that the answer fills, where the model's tokenizer has tokens for that."""
    raw: bool | None = None
    """The prompt is taken as it is, without template and system prompt."""
    template: Never = None
    images: list[str] | None = None
    """Images in base64."""
    context: Never = None
    width: Never = None
    height: Never = None
    steps: Never = None


class EmbedCommon(Struct, kw_only=True):
    model: Name
    options: dict[str, Any] | None = None
    """Options of the model. They have no effect."""
    keep_alive: float | str | None = None


class EmbedRequest(EmbedCommon, kw_only=True):
    """Embedding request. Without input the model is loaded, or unloaded with `keep_alive: 0`."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    """Cut a text over the context to its beginning. Absent: such a text is refused."""
    dimensions: Count | None = None


class EmbeddingsRequest(EmbedCommon, kw_only=True):
    """Embedding request of the older route, for one text."""

    prompt: str | None = None


class OllamaModelName(Struct, kw_only=True):
    """Request that names a model in one of two fields; `name` is the older."""

    model: Name | None = None
    name: Name | None = None

    @property
    def requested_name(self) -> str:
        """The model's name. Raises ApiError 400 where it is missing."""
        if not (name := self.model or self.name):
            raise missing_parameter("model")
        return name


class ShowRequest(OllamaModelName, kw_only=True):
    verbose: NoEffect = None
    """No effect: answers never hold the vocabulary."""


class CopyRequest(Struct, kw_only=True):
    source: Name
    destination: Name


class AliasParameters(OllamaOptions, kw_only=True):
    """Options that a name can keep."""

    num_ctx: Count | None = None
    presence_penalty: Never = None
    frequency_penalty: Never = None
    seed: Never = None
    stop: Never = None
    num_predict: Never = None


class CreateRequest(OllamaModelName, kw_only=True):
    """Request for a name with parameters and a system prompt of its own: an alias of `from`."""

    from_: Name | None = field(default=None, name="from")
    system: str | None = None
    parameters: AliasParameters | None = None
    stream: bool | None = None
    """Absent: true, as with Ollama."""
    license: NoEffect = None
    template: Never = None
    messages: Never = None
    adapters: Never = None
    files: Never = None
    quantize: Never = None
    modelfile: Never = None


class DeleteRequest(OllamaModelName, kw_only=True):
    pass


class OllamaPullRequest(OllamaModelName, kw_only=True):
    stream: bool | None = None
    """Absent: true, as with Ollama."""
    insecure: NoEffect = None
    """Every file's hash is checked."""


_HUBS = ("hf.co/", "huggingface.co/")
_TAG = ":latest"


def normalize_name(name: str) -> str:
    """Strip the hub's host and the default tag from an Ollama model name."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(_TAG)
