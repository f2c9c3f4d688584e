"""Types and bounds of the Messages API's fields."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..openai.request_types import Count, Later, Name, Never, NoEffect, Tag, Temperature, ToolName, TopP

TopK = Annotated[int, Meta(ge=0, lt=2**31)]


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: NoEffect = None
    """Has no effect: the prefix of every prompt is cached."""
    citations: NoEffect = None


class ImageSourceParam(Struct, kw_only=True):
    type: Literal["base64", "url", "file"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Struct, kw_only=True, tag_field="type", tag="image"):
    """Image, in base64 or by its URL."""

    source: ImageSourceParam
    cache_control: NoEffect = None


class TextSource(Struct, kw_only=True, tag_field="type", tag="text"):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class BlocksSource(Struct, kw_only=True, tag_field="type", tag="content"):
    content: str | list[TextBlock | ImageBlock]


class Base64Source(Struct, kw_only=True, tag_field="type", tag="base64"):
    data: Any = None
    media_type: Any = None


class UrlSource(Struct, kw_only=True, tag_field="type", tag="url"):
    url: Any = None


class FileSource(Struct, kw_only=True, tag_field="type", tag="file"):
    file_id: Any = None


class DocumentBlock(Struct, kw_only=True, tag_field="type", tag="document"):
    """Document. Text is read; PDFs and files are refused."""

    source: TextSource | BlocksSource | Base64Source | UrlSource | FileSource
    title: str | None = None
    context: str | None = None
    citations: NoEffect = None
    cache_control: NoEffect = None


class SearchResultBlock(Struct, kw_only=True, tag_field="type", tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]
    citations: NoEffect = None
    cache_control: NoEffect = None


class ToolReferenceBlock(Struct, kw_only=True, tag_field="type", tag="tool_reference"):
    """Tool found by a tool search. The tool, sent with `defer_loading`, is offered from now on."""

    tool_name: ToolName
    cache_control: NoEffect = None


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: Name
    name: ToolName
    input: dict[str, Any]
    cache_control: NoEffect = None


class ToolResultBlock(Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: Name
    content: (
        str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock] | None
    ) = None
    is_error: bool | None = None
    cache_control: NoEffect = None


Block = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)


class MessageParam(Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    """`system`, in mid-conversation: instructions from here on."""
    content: str | list[Block]


class ToolParam(Struct, kw_only=True):
    name: ToolName
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Offered only once a `tool_reference` names it."""
    input_examples: list[dict[str, Any]] | None = None
    """Shown to the model with the description."""
    eager_input_streaming: NoEffect = None
    """Has no effect: arguments come once they are complete."""
    allowed_callers: NoEffect = None
    cache_control: NoEffect = None


class ToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    """`omitted`: thinking blocks are left out of the answer."""
    block_binding: NoEffect = None
    """Has no effect: thinking blocks carry no signature that could fail."""


class Metadata(Struct, kw_only=True):
    user_id: Tag | None = None


class AnthropicOutputFormat(Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class ThinkingTurns(Struct, kw_only=True):
    type: Literal["thinking_turns", "all"]
    value: Count | None = None


class ContextEdit(Struct, kw_only=True):
    """Context edit. `clear_thinking_20251015` is applied, other edits are refused."""

    type: str
    keep: Literal["all"] | ThinkingTurns | None = None
    """Number of latest turns whose thinking blocks stay; absent: one."""


class ContextManagement(Struct, kw_only=True):
    edits: list[ContextEdit] | None = None


class OutputConfig(Struct, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicOutputFormat | None = None
    task_budget: Later = None


class CountTokensRequest(Struct, kw_only=True):
    """Fields that determine the prompt."""

    model: Name
    messages: list[MessageParam]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: AnthropicOutputFormat | None = None
    """An older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    cache_control: NoEffect = None
    """Has no effect: the prefix of every prompt is cached."""
    mcp_servers: Never = None
    compaction: Later = None
    speed: Never = None
    thread: Never = None
    billing_policy: Never = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Count
    """Upper bound of the answer's tokens; fewer where the context ends first."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: NoEffect = None
    container: Never = None
    inference_geo: Never = None
    fallbacks: Never = None
    fallback_credit_token: Never = None
