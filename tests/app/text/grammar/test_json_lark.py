"""Grammars for texts inside JSON strings: what they take is what the grammar takes, escaped."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from llmbox.app.text.grammar.json_lark import LarkError, lark_in_json

PATCH = """start: begin hunk+ end // a patch
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF -> line)+
%import common.LF
"""


@pytest.fixture(scope="module")
def tokenizer():
    return LLTokenizer("byte")


def takes(tokenizer, lark: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    ids = list(inside.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("syntax", "definition", "taken", "refused"),
    [
        (
            "lark",
            PATCH,
            ['*** Begin Patch\n*** Add File: a b\n+x = "\\n"\t1\n+\n*** End Patch'],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\nx\n*** End Patch"],
        ),
        ("lark", 'start: "(" start? ")" | A\nA: "\\n"', ["((\n))", "()"], ["(", "(()"]),
        ("lark", 'start: "a" A*\nA: /.+/\n%ignore /\\n/', ["a\n", "a\nbc"], ["b"]),
        ("lark", 'start: "a.b" "\\t" "ß"i', ["a.b\tß"], ["axb\tß", "a.b\\tß"]),
        ("lark", 'start: "aB"i "c".."e"', ["ABd", "abe"], ["abf", "abC"]),
        ("lark", "start: /[^a\\n]+/", ['x"\\', "é😀"], ["", "a", "x\n"]),
        ("lark", "start: /x.y/s /a\\/b/", ["x\nya/b", "x.ya/b"], ["xya/b"]),
        ("lark", "start: /[a-c]+/i NUMBER\n%import common.INT -> NUMBER", ["AbC12"], ["d1", "a"]),
        ("lark", "start: A B\n%import common (WS, DIGIT)\nA: WS\nB: DIGIT", ["\n\t 1"], ["1"]),
        ("regex", r"^(\d{2}|\w+)\s\W$", ["12\n-", "a_b\t\\"], ["-\n-", "12\na"]),
        ("regex", r"(?i:ab)c", ["ABc", "abc"], ["abC"]),
    ],
)
def test_what_it_takes(tokenizer, syntax, definition, taken, refused):
    lark = lark_in_json(definition, syntax)
    assert [text for text in taken if not takes(tokenizer, lark, text)] == []
    assert [text for text in refused if takes(tokenizer, lark, text)] == []


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("regex", "(?=a)b"),
        ("regex", r"a\b"),
        ("regex", "(a"),
        ("regex", "a*?"),
        ("regex", r"[^\s\S]"),
        ("lark", "start: /a/x"),
        ("lark", "%import common.C_COMMENT\nstart: C_COMMENT"),
        ("lark", "%import python.NAME\nstart: NAME"),
        ("lark", 'start: %json {"type": "object"}'),
        ("lark", "start: @other"),
        ("lark", 'start: "z".."a"'),
        ("regex", "(" * 5000 + ")" * 5000),
    ],
)
def test_what_it_cannot_rewrite(syntax, definition):
    with pytest.raises(LarkError):
        lark_in_json(definition, syntax)
