"""Rewriting of a Lark grammar or a regular expression for texts inside a JSON string.

Models write calls as JSON, so that a line break of a custom tool's input is written as a backslash and an
n. Here every literal, class and import of a grammar is replaced by its escaped form.

A grammar without recursion becomes one terminal. Otherwise its lexer would have to know after a backslash
which terminal goes on: escapes of two characters begin alike, and lexers do not go back.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as regex_parser  # type: ignore[attr-defined]
from typing import Any, Final, Literal

_SHORT: Final = {8: r"\b", 9: r"\t", 10: r"\n", 12: r"\f", 13: r"\r", 34: r"\"", 92: r"\\"}
_SPECIAL: Final = frozenset(range(32)) | {34, 92}
"""Characters that cannot stand in a JSON string as they are."""
_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_CLASSES: Final = {
    "DIGIT": [(48, 57)],
    "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "SPACE": [(9, 13), (32, 32)],
}
_IMPORTS: Final = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
}
"""Terminals of Lark's `common` with characters that are escaped."""
_PLAIN: Final = re.compile(
    "DIGIT|HEXDIGIT|INT|SIGNED_INT|DECIMAL|FLOAT|SIGNED_FLOAT|NUMBER|SIGNED_NUMBER"
    "|LETTER|LCASE_LETTER|UCASE_LETTER|WORD|CNAME"
)
_TOKEN: Final = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<range>"(?:\\.|[^"\\\n])+"\s*\.\.\s*"(?:\\.|[^"\\\n])+")
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<imported>%import[^\n]*)
    |(?P<refused>%(?!ignore\b)[a-z]+|@\w|<[^<>\s]+>)
    |(?P<alias>->\s*\w+)
    |(?P<ignore>%ignore\b)
    |(?P<rule>[!?]?_?[a-z][a-z0-9_]*)
    |(?P<terminal>_?[A-Z][A-Z0-9_]*)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_DEFINES: Final = re.compile(r"\s*:")
_TERMINAL: Final = "RULE_"
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_MEANT: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b"}
_IMPORT: Final = re.compile(r"%import\s+common(?:\.(\w+)|\s*\(([\w\s,]*)\))\s*(?:->\s*(\w+))?\s*")
Ranges = list[tuple[int, int]]


class LarkError(ValueError):
    """Grammar that cannot be followed inside JSON. The message is for callers."""


def lark_in_json(definition: str, syntax: Literal["lark", "regex"]) -> str:
    """Return the Lark grammar of the escaped texts. Raises LarkError."""
    if syntax == "regex":
        return f"start: ANSWER\nANSWER: /{_escaped_regex(definition)}/"
    tokens = list(_rewrite_tokens(definition))
    if any(kind == "ignore" for kind, _ in tokens) or _recurs(tokens):
        return "".join(text for _, text in tokens)
    flat = (
        _TERMINAL + text.lstrip("!?").upper() if kind == "rule" else text
        for kind, text in tokens
        if kind != "alias"
    )
    return f"start: {_TERMINAL}START\n{''.join(flat)}"


def _rewrite_tokens(definition: str) -> Iterator[tuple[str, str]]:
    """Yield kinds of tokens, and the tokens as they are inside JSON."""
    for token in _TOKEN.finditer(definition):
        text, kind = token[0], token.lastgroup or "other"
        match kind:
            case "comment":
                continue
            case "range":
                first, last = (_unescaped(each[1:-1]) for each in re.split(r"(?<=\")\s*\.\.\s*(?=\")", text))
                text = _range(first, last)
            case "text":
                text = _escaped_text(text)
            case "pattern":
                pattern, _, flags = text[1:].rpartition("/")
                text = f"/{_escaped_regex(pattern.replace(chr(92) + '/', '/'), flags)}/"
            case "imported":
                text = _imported(text)
            case "refused":
                raise LarkError(f"{text!r} is not supported in the grammar of a tool")
        yield kind, text


def _recurs(tokens: list[tuple[str, str]]) -> bool:
    """Return True if a rule leads back to itself."""
    uses: dict[str, set[str]] = {}
    inside: set[str] = set()
    for number, (kind, text) in enumerate(tokens):
        if kind not in ("rule", "terminal"):
            continue
        following = "".join(each for _, each in tokens[number + 1 : number + 8])
        if _DEFINES.match(following):
            inside = uses.setdefault(text.lstrip("!?"), set())
        else:
            inside.add(text)
    done: set[str] = set()
    while ready := [
        name for name, used in uses.items() if name not in done and not (used & uses.keys()) - done
    ]:
        done.update(ready)
    return len(done) < len(uses)


def _imported(statement: str) -> str:
    found = _IMPORT.fullmatch(statement.partition("//")[0])
    if found is None:
        raise LarkError(f"{statement.strip()!r} is not supported: only terminals of 'common' can be imported")
    names = [found[1]] if found[1] else [name.strip() for name in found[2].split(",")]
    return "\n".join(_terminal(name, found[3] or name) for name in names)


def _terminal(name: str, alias: str) -> str:
    if name in _IMPORTS:
        return f"{alias}: /{_escaped_regex(_IMPORTS[name])}/"
    if _PLAIN.fullmatch(name) is None:
        raise LarkError(f"the terminal 'common.{name}' is not supported in the grammar of a tool")
    return f"%import common.{name}" + (f" -> {alias}" if alias != name else "")


def _escaped_text(literal: str) -> str:
    """Escape a quoted text of Lark, with its flag."""
    body, _, flag = literal[1:].rpartition('"')
    text = _unescaped(body)
    return f"/{''.join(_character(ord(each), flag == 'i') for each in text)}/" if text else '""'


def _unescaped(body: str) -> str:
    def meant(found: re.Match[str]) -> str:
        digits = found[1] or found[2]
        return chr(int(digits, 16)) if digits else _MEANT.get(found[3], found[3])

    return _ESCAPE.sub(meant, body)


def _range(first: str, last: str) -> str:
    if len(first) != 1 or len(last) != 1 or first > last:
        raise LarkError(f"a range goes from one character to another, not from {first!r} to {last!r}")
    return f"/{_class([(ord(first), ord(last))])}/"


def _escaped_regex(pattern: str, flags: str = "") -> str:
    if unknown := set(flags) - set("isu"):
        raise LarkError(f"the flag {min(unknown)!r} of a regular expression is not supported")
    try:
        parsed = regex_parser.parse(pattern, re.DOTALL if "s" in flags else 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise LarkError(f"the regular expression /{pattern[:80]}/ cannot be read: {error}") from None
    if parsed.state.flags & (re.VERBOSE | re.MULTILINE):
        raise LarkError(f"the flags of the regular expression /{pattern[:80]}/ are not supported")
    flag = parsed.state.flags
    writer = _RegexWriter(bool(flag & re.IGNORECASE) or "i" in flags, every=bool(flag & re.DOTALL))
    return writer.sequence(parsed)


class _RegexWriter:
    """Writer of regular expressions in Rust's syntax, from Python's parsed form."""

    def __init__(self, ignore_case: bool, *, every: bool) -> None:
        self._ignore_case, self._every = ignore_case, every

    def sequence(self, parts: Iterable[Any]) -> str:
        return "".join(self._part(kind, value) for kind, value in parts)

    def _part(self, kind: Any, value: Any) -> str:
        writers: dict[Any, Callable[[Any], str]] = {
            code.LITERAL: lambda each: _character(each, self._ignore_case),
            code.NOT_LITERAL: lambda each: _class(_complement(self._fold_case([(each, each)]))),
            code.ANY: lambda _: _class(_complement([] if self._every else [(10, 10)])),
            code.IN: self._in,
            code.BRANCH: lambda each: f"(?:{'|'.join(map(self.sequence, each[1]))})",
            code.SUBPATTERN: self._group,
            code.MAX_REPEAT: self._repeat,
            code.AT: self._anchor,
        }
        if kind not in writers:
            raise LarkError(f"regular expressions with {str(kind).lower()} are not supported here")
        return writers[kind](value)

    def _group(self, value: tuple[Any, int, int, Any]) -> str:
        _, added, removed, inner = value
        ignore_case = (self._ignore_case or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
        every = (self._every or bool(added & re.DOTALL)) and not removed & re.DOTALL
        return f"(?:{_RegexWriter(ignore_case, every=every).sequence(inner)})"

    def _repeat(self, value: tuple[int, Any, Any]) -> str:
        low, high, inner = value
        most = "" if high is code.MAXREPEAT else str(high)
        return f"(?:{self.sequence(inner)}){{{low},{most}}}"

    def _anchor(self, where: Any) -> str:
        if where in {code.AT_BEGINNING, code.AT_END, code.AT_BEGINNING_STRING, code.AT_END_STRING}:
            return ""  # the whole text is matched in any case
        raise LarkError("word boundaries in regular expressions are not supported here")

    def _in(self, parts: list[Any]) -> str:
        ranges: Ranges = []
        for kind, value in parts:
            if kind is code.LITERAL:
                ranges.append((value, value))
            elif kind is code.RANGE:
                ranges.append(value)
            elif kind is code.CATEGORY:
                _, _, name = str(value).partition("_")
                known = _CLASSES[name.removeprefix("NOT_")]
                ranges += _complement(known) if name.startswith("NOT_") else known
        ranges = self._fold_case(ranges)
        return _class(_complement(ranges) if parts[0][0] is code.NEGATE else ranges)

    def _fold_case(self, ranges: Ranges) -> Ranges:
        """Add the other case of ASCII letters, where case is ignored."""
        if not self._ignore_case:
            return ranges
        letters = [c for c in range(128) if chr(c).isalpha() and any(a <= c <= b for a, b in ranges)]
        return ranges + [(c ^ 32, c ^ 32) for c in letters]


def _character(value: int, ignore_case: bool) -> str:
    if ignore_case and value < 128 and chr(value).isalpha():
        return f"[{chr(value)}{chr(value ^ 32)}]"
    if value in _SHORT:
        return re.escape(_SHORT[value])
    if value in _SPECIAL:
        return rf"\\u00{value >> 4}[{value & 15:x}{value & 15:X}]"
    text = chr(value)
    return text if text == " " or (text.isascii() and text.isalnum()) else rf"\x{{{value:X}}}"


def _class(ranges: Ranges) -> str:
    """Write a pattern of one character in these ranges; of the characters that JSON escapes, only those with
    a short escape.
    """
    specials = [f"(?:{_character(c, False)})" for c in _SHORT if any(a <= c <= b for a, b in ranges)]
    reserved = [(c, c) for c in _SPECIAL] + [_SURROGATES]
    plain = "".join(rf"\x{{{a:X}}}-\x{{{b:X}}}" for a, b in _complement(_complement(ranges) + reserved))
    alternatives = ([f"[{plain}]"] if plain else []) + specials
    if not alternatives:
        raise LarkError("a class of characters in a regular expression is empty")
    return f"(?:{'|'.join(alternatives)})"


def _complement(ranges: Ranges) -> Ranges:
    """Return the complement: all characters but these."""
    left, begin = [], 0
    for a, b in sorted(ranges):
        if a > begin:
            left.append((begin, a - 1))
        begin = max(begin, b + 1)
    return [*left, (begin, _LAST)] if begin <= _LAST else left
