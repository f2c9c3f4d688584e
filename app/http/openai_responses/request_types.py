"""Types and bounds of the Responses API's fields."""

from typing import Any, Literal

from msgspec import Struct

from ..openai.request_types import (
    Count,
    Effort,
    Later,
    Name,
    Never,
    NoEffect,
    StreamOptions,
    Temperature,
    ToolName,
    TopLogprobs,
    TopP,
)


class ContentPartParam(Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    """Image of an `input_image`: a `data:` URL with base64, or a URL that the server may fetch."""
    detail: str | None = None


class MessageItem(Struct, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPartParam]


class FunctionCallItem(Struct, kw_only=True):
    call_id: Name
    name: ToolName
    arguments: str
    namespace: Name | None = None


class CallOutputItem(Struct, kw_only=True):
    call_id: Name
    output: str | list[ContentPartParam]


class ReasoningItem(Struct, kw_only=True):
    content: list[ContentPartParam] | None = None
    summary: list[ContentPartParam] | None = None


class CompactionItem(Struct, kw_only=True):
    encrypted_content: str


class CustomCallItem(Struct, kw_only=True):
    call_id: Name
    name: ToolName
    input: str
    namespace: Name | None = None


class AdditionalToolsItem(Struct, kw_only=True):
    tools: list[dict[str, Any]]


class ResponsesFunctionTool(Struct, kw_only=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: NoEffect = None
    defer_loading: NoEffect = None
    allowed_callers: Never = None


class TextFormatOfTool(Struct, kw_only=True):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponsesCustomTool(Struct, kw_only=True):
    """Tool that takes a text. A grammar constrains the text."""

    name: ToolName
    description: str | None = None
    format: TextFormatOfTool | None = None
    defer_loading: NoEffect = None
    allowed_callers: Never = None


class NamespaceTool(Struct, kw_only=True):
    """Functions and custom tools under a common name."""

    name: ToolName
    tools: list[dict[str, Any]]
    description: str | None = None


class ResponseToolChoice(Struct, kw_only=True):
    """Tool choice: `function` and `custom` have a name, `allowed_tools` a mode and tools."""

    type: str
    name: ToolName | None = None
    namespace: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class Reasoning(Struct, kw_only=True):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Answers always follow the schema."""


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationReference(Struct, kw_only=True):
    id: Name


class PromptFields(Struct, kw_only=True):
    """Fields that determine the prompt."""

    input: str | list[dict[str, Any]] | None = None
    """Items: `message` (also without a type), `function_call`, `function_call_output`, `custom_tool_call`,
    `custom_tool_call_output`, `reasoning`, `compaction`, `additional_tools`."""
    model: Name | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationReference | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools of type `function`, `custom` and `namespace`; of other types only those that a model may do
    without.
    """
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """`auto`: of a conversation that does not fit, the oldest items are left out."""

    @property
    def conversation_id(self) -> str | None:
        asked = self.conversation
        return asked.id if isinstance(asked, ConversationReference) else asked


class ResponseRequest(PromptFields, kw_only=True):
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: TopLogprobs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = None
    """`message.output_text.logprobs`; others have no effect."""
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: NoEffect = None
    prompt_cache_options: NoEffect = None
    image: NoEffect = None
    client_metadata: dict[str, Any] | None = None
    service_tier: Never = None
    store: bool | None = None
    background: bool | None = None
    max_tool_calls: Count | None = None
    """Bound on calls of tools that a server runs: there are none here."""
    prompt: Later = None
    context_management: Never = None
    moderation: Never = None
    access_programs: Never = None


class InputTokensRequest(PromptFields, kw_only=True):
    personality: Never = None


class CompactRequest(Struct, kw_only=True):
    model: Name
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    """Added to the model's instructions for its summary."""
    previous_response_id: Name | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: NoEffect = None
    prompt_cache_options: NoEffect = None
    image: NoEffect = None
    service_tier: Never = None
