"""Grammars of answers in llguidance's format: a list of grammars, of which the first is the start.

Texts may be written in any tokens (`no_forcing`): the next token depends on the text so far alone.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from llmbox.engine.ipc.messages import Vocabulary

from ..output.output_formats import HARMONY, HARMONY_ANSWER, HARMONY_THOUGHTS, HARMONY_TURN, ToolSyntax
from ..tokenizer.tokenizer import TextModel
from .call_grammars import CallGrammars, Grammar, json_schema

__all__ = ["Grammar", "json_schema"]

_SAYS: Final = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_JOINS: Final = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
"""Keywords that describe an object together: none of them may forbid keys that another one requires."""
_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES: Final = ("items", "contains", "additionalProperties", "if", "then", "else", "not")


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `additionalProperties: false` where an object names its properties and leaves that
    open.
    """
    shared = {ref for ref in _joined_references(schema, joined=False) if ref != "#"}
    closed: dict[str, Any] = _closed(schema, "#", shared, joined=False)
    return closed


def _closed(schema: Any, at: str, shared: set[str], *, joined: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        place, parts = f"{at}/{name}", joined or _joins(schema)
        if name in _MAPS and isinstance(value, dict):
            made[name] = {
                key: _closed(each, f"{place}/{key}", shared, joined=name == "dependentSchemas")
                for key, each in value.items()
            }
        elif name in _LISTS and isinstance(value, list):
            beside = parts and name != "prefixItems"
            made[name] = [
                _closed(each, f"{place}/{n}", shared, joined=beside) for n, each in enumerate(value)
            ]
        elif name in _ONES:
            made[name] = _closed(value, place, shared, joined=name in {"if", "then", "else", "not"})
        else:
            made[name] = value
    alone = not joined and at not in shared and not any(name in schema for name in (*_JOINS, *_SAYS))
    if alone and _names_all_keys(schema):
        made["additionalProperties"] = False
    return made


def _names_all_keys(schema: dict[str, Any]) -> bool:
    """Closed without one of its `required` keys, an object could not be written at all."""
    named, required = schema.get("properties"), schema.get("required", [])
    return isinstance(named, dict) and isinstance(required, list) and all(key in named for key in required)


def _joins(schema: dict[str, Any]) -> bool:
    """Return True if several parts of the schema describe one object together."""
    several = len(schema.get("allOf") or ()) if isinstance(schema.get("allOf"), list) else 0
    kinds = sum(name in schema for name in (*_JOINS, "properties"))
    return several > 1 or kinds > 1


def _joined_references(schema: Any, *, joined: bool) -> Iterator[str]:
    """Yield `$ref` targets that are used beside other constraints on the same object."""
    if isinstance(schema, list):
        for each in schema:
            yield from _joined_references(each, joined=joined)
    if not isinstance(schema, dict):
        return
    parts = joined or _joins(schema)
    if parts and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            for each in value.values():
                yield from _joined_references(each, joined=False)
        elif name in _LISTS:
            yield from _joined_references(value, joined=parts and name != "prefixItems")
        elif name in _ONES:
            yield from _joined_references(value, joined=False)


def regex(pattern: str) -> Grammar:
    r"""Grammar of answers that match a pattern as a whole; `\d`, `\w` and `\s` are ASCII."""
    return {"regex": pattern}


def choice(texts: Sequence[str]) -> Grammar:
    return {"lark_grammar": "start: " + " | ".join(map(_quoted, texts))}


def written(grammar: str) -> Grammar:
    """Grammar in Lark's notation or llama.cpp's (GBNF)."""
    return {"gbnf": grammar}


def json_input(name: str, lark: str, field: str) -> list[Grammar]:
    """Grammar of an object with one text, which `lark` describes in its escaped form; `name` is the grammar's
    name.
    """
    around = f'start: {_quoted("{" + json.dumps(field) + ": " + chr(34))} @{name} "\\"}}"'
    return [{"lark_grammar": around}, {"name": name, "lark_grammar": lark}]


def calls(
    text: TextModel,
    syntax: ToolSyntax,
    tools: Sequence[dict[str, Any]],
    inputs: Mapping[str, list[Grammar]],
    *,
    several: bool,
    opened: bool = False,
) -> list[Grammar]:
    """Return the grammar of tool calls as the model writes them, with arguments by their schemas.

    `inputs`: grammars that replace the schemas, by names of tools. `several`: more than one call.
    `opened`: the opening mark was written.
    """
    return CallGrammars(syntax, special_tokens(text), inputs).make(tools, several=several, opened=opened)


def free_text(text: TextModel, syntax: ToolSyntax) -> Grammar:
    """Return the grammar of free text without a tool call, perhaps with calls after it."""
    if syntax.bare:
        begin = "[" if syntax.style == "python" else "{"
        return {"lark_grammar": "start: WORDS?\n" + rf"WORDS: /\s*[^\s\{begin}](?s:.)*/"}
    if special_tokens(text)(syntax.opener) is not None:
        return {"lark_grammar": "start: WORDS? @calls?\nWORDS: /(?s:.)+/"}
    return {"lark_grammar": _words_before(syntax.opener)}


def bare_calls(syntax: ToolSyntax, tools: Sequence[dict[str, Any]]) -> Grammar:
    """Return the grammar of any text, or of calls where it begins as a call of one of the tools."""
    bracket = "[" if syntax.style == "python" else ""
    begins = [bracket + syntax.text_before_arguments(tool["function"]["name"]) for tool in tools]
    pattern = "|".join(re.escape(each).replace("/", r"\/") for each in begins)
    other = rf"OTHER: /(?s:.)+/ & ~/(?:{pattern})(?s:.)*/"
    return {"lark_grammar": f'%llguidance {{"no_forcing": true}}\nstart: OTHER? | @calls\n{other}'}


def special_tokens(text: TextModel) -> Callable[[str], int | None]:
    """Return the function that finds special tokens by their content. They have no text in grammars."""

    def find(content: str) -> int | None:
        token: int | None = text.tokenizer.token_to_id(content)
        return token if token in text.tokens.special_ids else None

    return find


def _words_before(mark: str) -> str:
    """Grammar of words, and of what follows after `mark`, in terminals that never have to be cut short.

    A lexer does not backtrack: a piece of text that begins like the mark ends where it differs from it. The
    first character of a mark stands in it once.
    """
    first = mark[0]
    begins = [re.escape(mark[:size]) for size in range(1, len(mark))]
    other = "|".join(f"{begin}[^{re.escape(first + mark[size])}]" for size, begin in enumerate(begins, 1))
    some = "|".join(reversed(begins))
    return (
        "start: word* (@calls | REST)?\nword: PLAIN | OTHER\n"
        f"PLAIN: /[^{re.escape(first)}]+/\nOTHER: /(?:{some})*(?:{other})/\nREST: /(?:{some})+/"
    )


def with_closed_objects(found: Sequence[Grammar]) -> list[Grammar]:
    """Close the objects of JSON schemas: no keys but the named ones, unless the schema allows them."""
    return [
        {**each, "json_schema": close_objects(each["json_schema"])} if "json_schema" in each else each
        for each in found
    ]


def grammars(
    answer: Grammar | None, of_calls: Sequence[Grammar] = (), harmony: TextModel | None = None
) -> list[Grammar]:
    """Combine the grammars of the answer and of calls: the answer, or calls, or either. `harmony`: the model
    writes both as messages, after others with its thoughts.
    """
    starts = (["@answer"] if answer is not None else []) + (["@calls"] if of_calls else [])
    rules = f"start: {' | '.join(starts)}" if harmony is None else _messages(harmony, answer, of_calls)
    top: Grammar = {"lark_grammar": f'%llguidance {{"no_forcing": true}}\n{rules}'}
    return [top, *([] if answer is None else [{"name": "answer", **answer}]), *of_calls]


def _messages(text: TextModel, answer: Grammar | None, of_calls: Sequence[Grammar]) -> str:
    marks = CallGrammars(HARMONY, special_tokens(text), {})
    last = [f"{marks.text(HARMONY_ANSWER.removeprefix(HARMONY_TURN))} @answer"] if answer is not None else []
    last += ["@calls"] if of_calls else []
    thought = f"{marks.text(HARMONY_THOUGHTS.opener)} {marks.text_until('thought', HARMONY_THOUGHTS.closer)}"
    rules = [f"start: thoughts* ({' | '.join(last)})", f"thoughts: {thought} {marks.text(HARMONY_TURN)}"]
    return "\n".join([*rules, *marks.rules])


def vocabulary(text: TextModel, vocab_size: int) -> Vocabulary:
    """Build the vocabulary for llguidance. Takes some tenths of a second for a large one."""
    tokens = [text.tokens.compute(i) for i in range(min(vocab_size, text.vocab_size))]
    special = text.tokens.special_ids.union(text.eos_token_ids)
    return Vocabulary(data=b"".join(tokens), sizes=[len(token) for token in tokens], special=sorted(special))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
