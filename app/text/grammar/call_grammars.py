"""Grammars of tool calls as each output format writes them, arguments by the tools' JSON schemas."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..output.call_parsers import property_schema, schema_types
from ..output.output_formats import ATTRIBUTE, MARK, NUMBER, ToolSyntax

Grammar = dict[str, Any]
"""Grammar in llguidance's JSON; a list of them is one grammar whose first member is the start."""
WHITE_SPACE: Final = r"( |\n{1,2}[ \t]{0,20})?"
"""White space between the parts of JSON: none, a blank, or a new line with its indent. Where more is allowed,
weak models write nothing else.
"""
_MOST_DEPTH: Final = 16
"""Nesting of a schema that is followed; deeper values are any value."""


def json_schema(schema: dict[str, Any]) -> Grammar:
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}}


@dataclass(slots=True)
class CallGrammars:
    """Grammars of one request's calls. `special` returns a special token's id; such tokens have no text."""

    syntax: ToolSyntax
    special: Callable[[str], int | None]
    inputs: Mapping[str, list[Grammar]]
    """Grammars that replace the schemas of arguments, by names of tools."""
    found: list[Grammar] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)

    def make(self, tools: Sequence[dict[str, Any]], *, several: bool, opened: bool) -> list[Grammar]:
        """Return the grammar `calls` and those that it refers to. `opened`: the first opener was written."""
        syntax = self.syntax
        several = several and syntax.most != 1
        names = [self._call(number, tool["function"]) for number, tool in enumerate(tools)]
        self.rules.append(f"call: {' | '.join(names)}")
        inner, pad = self._between_marks(len(names), several=several), self.text(syntax.padding)
        opener = "" if syntax.bare and not opened else self.text(syntax.opener)
        closer = "" if syntax.style == "harmony" or (syntax.bare and not opened) else self.text(syntax.closer)
        rest = f"{pad} {inner} {pad} {closer}"
        more = f"({self.text(syntax.between)} {opener} {rest})*" if several and not syntax.several else ""
        start = f"start: {'' if opened else opener} {rest} {more}"
        lark = "\n".join([start, *self.rules])
        return [{"name": "calls", "lark_grammar": lark}, *self.found]

    def _between_marks(self, tools: int, *, several: bool) -> str:
        """Return the expression between opener and closer: a call, or several where the format has lists."""
        syntax = self.syntax
        if syntax.style == "python":  # with the bracket in one piece: bare calls are known by it
            self.rules.append(f"first: {' | '.join(f'first{number}' for number in range(tools))}")
            first, comma, end = "first", '", "', ' "]"'
        elif syntax.style == "json" and syntax.several:
            first, comma, end = '"[" call', '", "', ' "]"'
        else:
            first, comma, end = "call", self.text(syntax.between), ""
            several = several and syntax.several
        return f"{first} ({comma} call)*{end}" if several else first + end

    def text(self, text: str) -> str:
        """Return terminals of a text: its special tokens by id, the rest quoted."""
        parts: list[str] = []
        at = 0
        for match in MARK.finditer(text):
            token = self.special(match[0])
            if token is not None:
                parts += [*self._quoted(text[at : match.start()]), f"<[{token}]>"]
                at = match.end()
        return " ".join([*parts, *self._quoted(text[at:])])

    def _quoted(self, text: str) -> list[str]:
        before, number, after = text.partition(NUMBER)
        pieces = [quote(before)] if before else []
        return [*pieces, "/[0-9]{1,3}/", *self._quoted(after)] if number else pieces

    def _call(self, number: int, function: dict[str, Any]) -> str:
        """Add the rule of one tool's call. Returns its name."""
        name, schema = function["name"], function.get("parameters") or {"type": "object"}
        syntax, arguments, given = self.syntax, f"arguments{number}", self.inputs.get(name)
        begin = syntax.text_before_arguments(name)
        match syntax.style:
            case "json":
                body = f'{quote(begin)} {self._json(arguments, schema, given)} "}}"'
            case "named_json" | "harmony":
                value = self._json(arguments, schema, given)
                body = f"{self.text(begin)} {value} {self.text(syntax.after_call)}"
            case "xml":
                members = self._members(arguments, schema, self._parameter, "", given)
                body = f"{self.text(begin)} {members} {self.text(syntax.after_call)}"
            case "python":
                members = self._members(arguments, schema, self._keyword, ", ", given)
                self.rules.append(f'first{number}: {quote(f"[{begin}")} {members} ")"')
                body = f'{quote(begin)} {members} ")"'
            case "gemma":
                members = self._members(arguments, schema, self._pair, ",", given)
                body = f'{quote(begin)} {members} "}}"'
        self.rules.append(f"call{number}: {body}")
        return f"call{number}"

    def _json(self, name: str, schema: dict[str, Any], given: list[Grammar] | None = None) -> str:
        """Add a JSON value. Returns the reference to it."""
        first, *others = given or [json_schema(schema)]
        self.found += [{"name": name, **first}, *others]
        return f"@{name}"

    # ------------------------------------------------------------------ members

    def _members(
        self,
        name: str,
        schema: dict[str, Any],
        member: Callable[[str, str, dict[str, Any], dict[str, Any]], str],
        comma: str,
        given: list[Grammar] | None,
    ) -> str:
        """Add the rules of an object's members, in the schema's order. Returns the first rule's name.

        `given`: grammars of a custom tool's input; its members are texts.
        """
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        keys = [key for key in schema.get("properties") or {} if isinstance(key, str)]
        items = []
        for number, key in enumerate(keys):
            rule = f"{name}m{number}"
            each = property_schema(schema, key) if given is None else {"type": "string"}
            self.rules.append(f"{rule}: {member(rule, key, each, schema)}")
            items.append((rule, key in (required or [])))
        return self._joined(name, items, quote(comma) if comma else "")

    def _joined(self, name: str, items: list[tuple[str, bool]], comma: str) -> str:
        """Add rules of a list of members of which the optional ones may be missing. Returns the first rule's
        name.

        Rule `fN` has the members from number N on, rule `rN` the same behind another member.
        """
        if not items:
            return '""'
        self.rules += [f'{name}{place}{len(items)}: ""' for place in "rf"]
        for number, (rule, is_required) in reversed([*enumerate(items)]):
            for place, before in (("r", f"{comma} "), ("f", "")):
                skipped = "" if is_required else f" | {name}{place}{number + 1}"
                self.rules.append(f"{name}{place}{number}: {before}{rule} {name}r{number + 1}{skipped}")
        return f"{name}f0"

    def _parameter(self, rule: str, key: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
        before, middle, after = self.syntax.parameter
        schema = resolve(schema, root)
        is_text = "string" in schema_types(schema)
        begin = self.text(before + key + middle.replace(ATTRIBUTE, "true" if is_text else "false"))
        end = after + self.syntax.after_parameter
        if not is_text:
            value = self._json(f"{rule}v", {**schema, **_definitions(root)})
            return f"{begin} {value} {self.text(end)}"
        return f"{begin} {self._text_until(rule, schema, end)}"

    def _keyword(self, rule: str, key: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
        return f"{quote(key + '=')} {self._json(f'{rule}v', {**schema, **_definitions(root)})}"

    def _pair(self, rule: str, key: str, schema: dict[str, Any], root: dict[str, Any]) -> str:
        return f"{quote(key + ':')} {self._gemma(rule, schema, root, 0)}"

    def _text_until(self, rule: str, schema: dict[str, Any], end: str) -> str:
        """Add the rule of a string without quotes, and of the text after it."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            texts = [each for each in values if isinstance(each, str)]
            if None in values and "null" in schema_types(schema):
                texts.append("null")
            return f"({' | '.join(map(quote, texts or ['']))}) {self.text(end)}"
        low, high = schema.get("minLength"), schema.get("maxLength")
        low = low if isinstance(low, int) and low >= 0 else 0
        most = str(high) if isinstance(high, int) and high >= low else ""
        return self.text_until(rule, end, f"{{{low},{most}}}" if low or most else "*")

    def text_until(self, rule: str, end: str, count: str = "*") -> str:
        """Add the rule of any text, and of `end` after it. `count`: of characters, as in a pattern."""
        mark = end.rstrip("\n") or end
        token = self.special(mark)
        if token is not None:
            return f"/(?s:.){count}/ <[{token}]> {self.text(end[len(mark) :])}"
        self.rules.append(f"{rule}t[suffix={quote(mark)}]: /(?s:.){count}/")
        return f"{rule}t {self.text(end[len(mark) :])}"

    def _gemma(self, rule: str, schema: dict[str, Any], root: dict[str, Any], depth: int) -> str:
        """Add the rules of a value in Gemma's notation. Returns what stands for it."""
        schema = resolve(schema, root)
        types = schema_types(schema)
        values = schema.get("enum")
        if (
            isinstance(values, list)
            and types <= {"string", "null"}
            and (choice := self._gemma_choice(values))
        ):
            return choice
        if len(types) != 1 or depth > _MOST_DEPTH:
            return self._any_gemma()
        match next(iter(types)):
            case "string":
                return self._gemma_text()
            case "integer" | "number" | "boolean" | "null":
                return self._json(f"{rule}v", {**schema, **_definitions(root)})
            case "array" if isinstance(schema.get("items"), dict):
                self.rules.append(f"{rule}i: {self._gemma(f'{rule}i', schema['items'], root, depth + 1)}")
                return f'"[" ({rule}i ("," {rule}i)*)? "]"'
            case "object" if schema.get("properties"):

                def pair(name: str, key: str, each: dict[str, Any], _: dict[str, Any]) -> str:
                    return f"{quote(key + ':')} {self._gemma(name, each, root, depth + 1)}"

                inner = self._members(f"{rule}o", schema, pair, ",", None)
                return f'"{{" {inner} "}}"'
        return self._any_gemma()

    def _gemma_choice(self, values: list[Any]) -> str:
        """Return the expression of one of these values; empty where one is an object or a list."""
        if any(isinstance(each, dict | list) for each in values):
            return ""
        mark, texts = self.text(self.syntax.quote), [each for each in values if isinstance(each, str)]
        strings = [f"{mark} ({' | '.join(map(quote, texts))}) {mark}"] if texts else []
        others = [quote(json.dumps(each)) for each in values if not isinstance(each, str)]
        return f"({' | '.join([*strings, *others])})" if others else "".join(strings)

    def _gemma_text(self) -> str:
        token = self.special(self.syntax.quote)
        mark = self.text(self.syntax.quote)
        if token is not None:
            return f"{mark} /(?s:.)*/ {mark}"
        if not any(rule.startswith("gtext[") for rule in self.rules):
            self.rules.append(f"gtext[suffix={quote(self.syntax.quote)}]: /(?s:.)*/")
        return f"{mark} gtext"

    def _any_gemma(self) -> str:
        if not any(rule.startswith("gany:") for rule in self.rules):
            self.rules.append("gkey: /[A-Za-z_][A-Za-z0-9_.$-]*/")
            self.rules.append(
                f'gany: {self._gemma_text()} | /-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null"'
                ' | "[" (gany ("," gany)*)? "]" | "{" (gkey ":" gany ("," gkey ":" gany)*)? "}"'
            )
        return "gany"


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def resolve(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Follow a reference to a definition of the schema; any value where it leads nowhere."""
    for _ in range(_MOST_DEPTH):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: Any = root
        for step in reference.removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            return {}
        schema = found
    return {}


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
