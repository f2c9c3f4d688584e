"""Types and bounds of request fields. Both the checks and the OpenAPI document are made from them.

Limits that the configuration may change (n, stop strings, messages, logit_bias) are checked in `sampling.py`
and `chat.py` instead.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
ThinkingBudget = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenKey = Annotated[str, Meta(pattern="^[0-9]{1,9}$", description="A token id.")]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31, description="-1, or 1 to the size of the vocabulary.")]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
CountOrZero = Annotated[int, Meta(ge=0, lt=2**31)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
TopLogprobsOrAll = Annotated[
    int,
    Meta(
        ge=-1,
        le=20,
        extra={"ge": 0},
        description="0 to 20; -1, the whole vocabulary, gets 400 with the reason.",
    ),
]
"""`extra`: the bound that the documentation names."""
TruncateTo = Annotated[
    int,
    Meta(
        ge=-1,
        lt=2**31,
        description="Keep only the last N tokens of a prompt; -1: as many as fit into the context.",
    ),
]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31, description="Lower is served first.")]
Name = Annotated[str, Meta(max_length=512)]
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
Tag = Annotated[str, Meta(max_length=512, description="Kept for the caller, or ignored.")]
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Salt = Annotated[str, Meta(min_length=1, max_length=512)]
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:\-]{1,128}\Z")]
Later = Annotated[Any, Meta(description="Not supported yet: a value other than the default gets 400.")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Never = Annotated[Any, Meta(description="Not supported: a value other than the default gets 400.")]
NoEffect = Annotated[Any, Meta(description="Taken, and without effect here.")]


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """`usage` so far in every chunk."""
    include_obfuscation: bool | None = None


class JsonSchema(Struct, kw_only=True):
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Answers always follow the schema."""


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    """JSON schema beside `json_object`, as llama.cpp takes it."""


class StructuredOutputs(Struct, kw_only=True):
    """Constraint on the answer: exactly one of these fields."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Lark's notation, or llama.cpp's (GBNF)."""
    json_object: bool | None = None
    structural_tag: Later = None


class GenerationFields(Struct, kw_only=True):
    """Fields that chat and plain completions share. null is the same as absent."""

    model: Name | None = None
    max_tokens: CountOrZero | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[TokenKey, Bias] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[TokenId] | None = None
    min_tokens: CountOrZero | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: TopLogprobsOrAll | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Tokens in `logprobs` are written `token_id:N`."""
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: TruncateTo | None = None
    timeout: Seconds | None = None
    """Seconds from the request's arrival until its answer ends, whatever there is of it."""
    first_token_timeout: Seconds | None = None
    """Seconds from the request's arrival to its first token; without one until then it fails with 503."""
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None

    user: Tag | None = None
    metadata: dict[MetadataKey, MetadataValue] | None = None
    session_id: Tag | None = None
    safety_identifier: Tag | None = None
    prompt_cache_key: Tag | None = None
    service_tier: Never = None
    include_reasoning: Later = None
    thinking_token_budget: Later = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: Never = None


class ImageUrl(Struct, kw_only=True):
    url: str
    """`data:` URL with base64; an http or https URL where the server fetches images."""
    detail: Literal["auto", "low", "high", "original"] | None = None
    """`low`: a small image without tiles."""


class ContentPart(Struct, kw_only=True):
    type: Name
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None


class FunctionCall(Struct, kw_only=True):
    name: ToolName
    arguments: str
    """JSON, as the model wrote it."""


class CustomCall(Struct, kw_only=True):
    name: ToolName
    input: str


class ToolCall(Struct, kw_only=True):
    """Tool call with `function` or `custom`, according to its type."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: Name | None = None
    type: Literal["function", "custom"] = "function"


class Function(Struct, kw_only=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class CustomGrammar(Struct, kw_only=True):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(Struct, kw_only=True):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomFunction(Struct, kw_only=True):
    """Custom tool: takes a text instead of a JSON object. A grammar constrains the text."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class FunctionTool(Struct, kw_only=True, tag_field="type", tag="function"):
    function: Function


class CustomTool(Struct, kw_only=True, tag_field="type", tag="custom"):
    custom: CustomFunction


Tool = FunctionTool | CustomTool


class ToolReference(Struct, kw_only=True):
    name: ToolName


class FunctionReference(Struct, kw_only=True, tag_field="type", tag="function"):
    function: ToolReference


class CustomReference(Struct, kw_only=True, tag_field="type", tag="custom"):
    custom: ToolReference


class AllowedTools(Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[FunctionReference | CustomReference]


class AllowedChoice(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Subset of `tools` that may be called in this answer."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | FunctionReference | CustomReference | AllowedChoice


class Message(Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None
    function_call: Later = None
    audio: Later = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: CountOrZero | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobsOrAll | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: ThinkingBudget | None = None
    """Tokens of thoughts after which the answer must begin; -1: any number."""
    thinking_loop_detection: bool | None = None
    """false: thoughts that repeat themselves for ever are not ended."""
    echo: bool | None = None
    """The answer begins with the last message, where that is the assistant's."""

    chat_template: Never = None
    documents: Never = None
    functions: Later = None
    function_call: Later = None
    verbosity: Never = None
    store: bool | None = None
    modalities: Never = None
    audio: Never = None
    moderation: Never = None
    web_search_options: Never = None
    prediction: NoEffect = None
    prompt_cache_retention: NoEffect = None
    prompt_cache_options: NoEffect = None


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Meta(ge=-1, le=5, extra={"ge": 0})] | None = None
    best_of: Count | None = None
    suffix: str | None = None
    """Text after the gap that a model made for that fills."""


class EmbeddingRequest(Struct, kw_only=True):
    """Input for embeddings. Texts get the special tokens that the model's tokenizer adds; token ids are taken
    as they are.
    """

    input: str | list[str | TokenId | list[TokenId]]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    """Number of leading dimensions to return; vectors are normalized again."""
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None

    truncate_prompt_tokens: TruncateTo | None = None
    prompt_name: str | None = None
    """Name of a prompt in `config_sentence_transformers.json`, which is put before each text."""
    input_type: Literal["query", "search_query", "document", "passage", "search_document"] | None = None
    """Kind of the texts, for the prompt of that kind, where the model's folder has one."""
    task: str | None = None
    """Task for which jina-embeddings-v3 has an adapter and an instruction, such as `retrieval.query`. Absent:
    neither is applied."""
    user: Tag | None = None


class RerankDocument(Struct):
    text: str


class RerankRequest(Struct, kw_only=True):
    """Rerank request in the shape of Jina's, Cohere's and vLLM's clients."""

    query: str
    documents: list[str | RerankDocument]
    model: Name | None = None
    top_n: Count | None = None
    """Number of best documents to return; absent: all."""
    return_documents: bool | None = None
    """Absent: yes."""
    instruction: str | None = None
    """Instruction for the ranking, for models that read one."""
    max_tokens_per_doc: Count | None = None
    """Maximum number of tokens of each document; later ones are ignored."""
    priority: Priority | None = None
    cache_salt: Salt | None = None
    request_id: RequestId | None = None

    user: Tag | None = None
    max_chunks_per_doc: Never = None
    truncate_prompt_tokens: Never = None


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt`, or `messages` as a chat would render them."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    chat_template: Never = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[TokenId]
    model: Name | None = None
