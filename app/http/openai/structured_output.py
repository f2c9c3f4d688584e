"""Structured output: fields that constrain the answer, compiled into a grammar for the engine."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from llmbox.engine.sampling_params import SamplingParams

from ...config.settings import LimitSettings
from ...engines.loaded_model import LoadedModel
from ...errors import ApiError
from ...gateway.gateway import Gateway
from ...text.grammar.grammars import (
    Grammar,
    bare_calls,
    calls,
    choice,
    free_text,
    grammars,
    json_schema,
    regex,
    vocabulary,
    with_closed_objects,
    written,
)
from ...text.output.output_formats import ToolSyntax
from ...util.threads import off_loop
from .chat_messages import input_grammars, is_forced
from .request_types import (
    ChatCompletionRequest,
    CustomReference,
    FunctionReference,
    FunctionTool,
    GenerationFields,
    ResponseFormat,
    StructuredOutputs,
)
from .sampling import invalid, within_grammar
from .unsupported import refuse_unsupported, unknown_fields

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class StructuredAnswer:
    """Constraint on an answer, and the field that set it."""

    param: str
    grammar: Grammar


@dataclass(frozen=True, slots=True)
class ToolCallRules:
    """Tools as the template was shown them. `forced`: the answer must be a call; otherwise it may be one."""

    tools: Sequence[dict[str, Any]]
    syntax: ToolSyntax
    inputs: Mapping[str, list[Grammar]]
    """Grammars of the inputs of custom tools, by their names."""
    forced: bool
    several: bool
    free: bool = False
    """A grammar could not be followed together with other fields of the request."""
    is_strict: bool = False
    """A tool asks that its schema is followed."""

    @property
    def bound(self) -> bool:
        """True if a grammar is needed: a call is forced, or the input of a custom tool has a grammar."""
        return self.forced or bool(self.inputs)


def find_answer_constraint(fields: GenerationFields, limits: LimitSettings) -> StructuredAnswer | None:
    """Read the constraint from the request's fields. Raises ApiError 400."""
    found = [
        StructuredAnswer(param, grammar)
        for param, grammar in _given(fields, limits.grammar_bytes)
        if grammar is not None
    ]
    if len(found) > 1:
        raise invalid(found[1].param, f"an answer cannot also follow '{found[0].param}'")
    if not found:
        return None
    _check_others(fields, found[0].param)
    return found[0]


def find_call_constraint(
    body: ChatCompletionRequest,
    tools: Sequence[dict[str, Any]] | None,
    syntax: ToolSyntax | None,
    limits: LimitSettings,
) -> ToolCallRules | None:
    """Build the constraint of tool calls. `tools`: those offered; `syntax`: how the model writes calls.
    Raises ApiError 400.
    """
    if not tools or syntax is None:
        return None
    choice = body.tool_choice
    named = isinstance(choice, FunctionReference | CustomReference)
    forced = is_forced(choice)
    if isinstance(choice, FunctionReference | CustomReference):
        name = choice.function.name if isinstance(choice, FunctionReference) else choice.custom.name
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    inputs = input_grammars(body, limits.grammar_bytes)
    wanted = ToolCallRules(
        tools=tools,
        syntax=syntax,
        inputs={
            tool["function"]["name"]: found
            for tool in tools
            if (found := inputs.get(tool["function"]["name"]))
        },
        forced=forced,
        several=not named and body.parallel_tool_calls is not False and syntax.most != 1,
        free=bool(body.ignore_eos or body.min_tokens or body.bad_words or body.allowed_token_ids is not None),
        is_strict=any(isinstance(tool, FunctionTool) and tool.function.strict for tool in body.tools or ()),
    )
    if wanted.bound:
        _check_others(body, "tool_choice" if forced else "tools")
    return wanted


async def add_grammar(
    params: SamplingParams,
    answer: StructuredAnswer | None,
    of_calls: ToolCallRules | None,
    model: LoadedModel,
    gateway: Gateway,
    limits: LimitSettings,
) -> tuple[SamplingParams, list[str]]:
    """Return `params` with the compiled grammar, and warnings. Raises ApiError 400."""
    if answer is None and (of_calls is None or not of_calls.bound):
        if of_calls is not None and not of_calls.free:
            return await _add_call_grammar(params, of_calls, model, gateway, limits)
        return await _with_vocabulary(params, model), []
    param = answer.param if answer is not None else "tool_choice" if of_calls and of_calls.forced else "tools"
    if not params.stop_token_ids:
        raise invalid(param, "this model has no end token")
    made: list[Grammar] = []
    followed = None if answer is None else answer.grammar
    if of_calls is not None:
        made = calls(model.text, of_calls.syntax, of_calls.tools, of_calls.inputs, several=of_calls.several)
        if of_calls.forced:
            followed, param = None, "tools"
        elif followed is None:
            followed = free_text(model.text, of_calls.syntax)
    harmony = model.text if model.text.output_format.is_harmony else None
    wanted = _closed(grammars(followed, made, harmony), limits)
    grammar = await gateway.grammars.compile_grammars(wanted, param)
    params = within_grammar(replace(params, grammar=grammar), model.text, calls_only=followed is None)
    return await _with_vocabulary(params, model), []


async def _add_call_grammar(
    params: SamplingParams,
    of_calls: ToolCallRules,
    model: LoadedModel,
    gateway: Gateway,
    limits: LimitSettings,
) -> tuple[SamplingParams, list[str]]:
    """Add the grammar that begins where the model begins a call. A schema that cannot be followed is an
    error only if it is strict; otherwise the arguments are not constrained.
    """
    syntax = of_calls.syntax
    made = calls(model.text, syntax, of_calls.tools, {}, several=of_calls.several, opened=not syntax.bare)
    top = [bare_calls(syntax, of_calls.tools), *made] if syntax.bare else grammars(None, made)
    try:
        grammar = await gateway.grammars.compile_grammars(_closed(top, limits), "tools")
    except ApiError as error:
        if error.status != 400 or of_calls.is_strict:
            raise
        why = error.message.partition(": ")[2]
        params = await _with_vocabulary(params, model)
        return params, [f"Arguments of calls are not checked against 'tools[].function.parameters': {why}"]
    triggers = ("",) if syntax.bare else (syntax.opener,)
    return await _with_vocabulary(replace(params, grammar=grammar, triggers=triggers), model), []


def _closed(wanted: list[Grammar], limits: LimitSettings) -> list[Grammar]:
    return wanted if limits.additional_properties else with_closed_objects(wanted)


def unknown_inside(plain: dict[str, Any]) -> list[str]:
    """Return warnings for unknown keys inside these fields."""
    found: list[str] = []
    for name, kind in (("response_format", ResponseFormat), ("structured_outputs", StructuredOutputs)):
        found += unknown_fields(kind, plain.get(name) or {}, f"{name}.")
    return found


async def _with_vocabulary(params: SamplingParams, model: LoadedModel) -> SamplingParams:
    """Send the vocabulary to the model's engines, with the first request that needs it."""
    supervisor = model.supervisor
    if params.needs_vocabulary and supervisor.vocabulary is None:
        size = model.info.vocab_size
        supervisor.vocabulary = await off_loop(size, lambda: vocabulary(model.text, size))
    return params


def _check_others(fields: GenerationFields, param: str) -> None:
    """Refuse fields that ask for an answer beyond the grammar's end."""
    if fields.ignore_eos:
        raise invalid("ignore_eos", f"it cannot be combined with '{param}'")
    if fields.min_tokens:
        raise invalid("min_tokens", f"it cannot be combined with '{param}'")


def _given(fields: GenerationFields, most: int) -> Iterator[tuple[str, Grammar | None]]:
    """Yield every field that may constrain the answer with its grammar, None where it does not."""
    yield "response_format", _of_format(fields.response_format, most)
    places: list[tuple[str, str, msgspec.Struct]] = [("guided_", "guided_", fields)]
    if (outputs := fields.structured_outputs) is not None:
        refuse_unsupported(outputs)
        places.append(("", "structured_outputs.", outputs))
    for prefix, at, place in places:
        for name, make in _MAKERS.items():
            value = getattr(place, prefix + name)
            yield at + name, None if value is None else make(at + name, value, most)


def _of_format(asked: ResponseFormat | None, most: int) -> Grammar | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return _schema("response_format", asked.schema or _ANY_OBJECT, most)
    if asked.json_schema is None:
        raise invalid("response_format", "the type 'json_schema' needs 'json_schema'")
    return _schema("response_format", asked.json_schema.schema or _ANY_OBJECT, most)


def _schema(param: str, schema: str | dict[str, Any], most: int) -> Grammar:
    _check_size(param, schema if isinstance(schema, str) else json.dumps(schema), most)
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid(param, "it is not JSON") from None
    if not isinstance(schema, dict):
        raise invalid(param, "a schema is a JSON object")
    return json_schema(schema)


def _choice(param: str, texts: list[str], most: int) -> Grammar:
    _check_size(param, "".join(texts), most)
    if not all(texts) or not texts:
        raise invalid(param, "there must be at least one text, and none may be empty")
    return choice(texts)


def _check_size(param: str, text: str, most: int) -> str:
    if len(text.encode("utf-8", "replace")) > most:
        raise invalid(param, f"it has at most {most} bytes")
    return text


_MAKERS: dict[str, Callable[[str, Any, int], Grammar | None]] = {
    "json": _schema,
    "regex": lambda param, pattern, most: regex(_check_size(param, pattern, most)),
    "choice": _choice,
    "grammar": lambda param, grammar, most: written(_check_size(param, grammar, most)),
    "json_object": lambda _, wanted, __: json_schema(_ANY_OBJECT) if wanted else None,
}
"""Makers of a field's grammar, by the name without a prefix. They get its whole name, its value, and the most
bytes of it.
"""
