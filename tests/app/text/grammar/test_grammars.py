"""Grammars are checked where they can do no harm; what passes compiles in an engine."""

import asyncio
import time
from dataclasses import replace

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.sandbox.pool import MOST_REPLIES, GrammarPool
from llmbox.app.text.grammar.grammars import calls, choice, grammars, json_schema, regex, vocabulary, written
from llmbox.app.text.output.call_parsers import parse_calls
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.app.util.threads import TENANT
from llmbox.engine.core.constraints.output_constraint import GrammarCompiler
from llmbox.engine.sampling_params import SamplingParams
from support.output_examples import FORMATS
from support.tokenizers_zoo import FAMILIES, SPECIALS, write_text_files

HERMES, MISTRAL, LLAMA = (FORMATS[name].tools for name in ("hermes", "mistral_json", "llama3"))
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"enum": [{"a": 1}]}}}
    for name in ("f", 'g"')
]


@pytest.fixture
async def pool():
    pool = GrammarPool()
    yield pool
    await pool.close()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def text(request, tmp_path_factory):
    return load_model_text(write_text_files(tmp_path_factory.mktemp("text"), FAMILIES[request.param]()))


def follows(grammar, text, answer, special=()):
    """Whether the answer's bytes, and `special` ids before them, are all of what it asks for."""
    size = text.vocab_size
    known = GrammarCompiler(size)
    known.set_vocabulary(vocabulary(text, size))
    stop = 0
    constraint = known.constraint(SamplingParams(max_tokens=1, grammar=grammar, stop_token_ids=(stop,)), 0)
    single = {text.tokens.compute(i): i for i in reversed(range(size)) if i not in text.tokens.special_ids}
    ids = [*special, *(single[bytes([byte])] for byte in answer.encode())]
    for at in range(len(ids) + 1):
        mask = constraint.allowed(ids[:at])
        if at == len(ids):
            return bool(mask[stop // 8] >> stop % 8 & 1)
        if not mask[ids[at] // 8] >> ids[at] % 8 & 1:
            return False
    return False


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """A model text in which every byte is a token."""
    return load_model_text(write_text_files(tmp_path_factory.mktemp("text"), FAMILIES["byte_level"]()))


async def test_what_passes_is_followed_to_its_end(pool, bytewise):
    cases = [
        (json_schema({"enum": [1, "é"]}), '"é"', '"e"'),
        (regex(r"[a-c]+/\d"), "ab/7", "ab/"),
        (regex("^a\nb$"), "a\nb", "ab"),
        (choice(["yes", 'n"o', "yes!"]), "yes!", "ye"),
        (written('root ::= "x" root | "y"'), "xxy", "xx"),
        (written('start: "x"* "y"'), "xxy", "x"),
    ]
    for answer, right, wrong in cases:
        grammar = await pool.compile_grammars(grammars(answer), "x")
        assert follows(grammar, bytewise, right)
        assert not follows(grammar, bytewise, wrong)


@pytest.mark.parametrize("syntax", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("several", [False, True])
async def test_calls_are_what_the_parser_reads(pool, bytewise, syntax, several):
    grammar = await pool.compile_grammars(
        grammars(None, calls(bytewise, syntax, TOOLS, {}, several=several and syntax.most != 1)), "x"
    )
    field = "parameters" if syntax == LLAMA else "arguments"
    one, other = (f'{{"name": {name}, "{field}": {{"a":1}}}}' for name in ('"f"', '"g\\""'))
    written_as = {
        HERMES: lambda *each: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in each),
        MISTRAL: lambda *each: f"[TOOL_CALLS][{', '.join(each)}]",
        LLAMA: lambda *each: ", ".join(each),
    }[syntax]
    for call in (one, other):
        assert follows(grammar, bytewise, written_as(call))
    assert follows(grammar, bytewise, written_as(one, other)) == (several and syntax != LLAMA)
    assert not follows(grammar, bytewise, written_as(one.replace("1", "2")))
    (read,) = parse_calls(HERMES, other)
    assert read.name == 'g"'


async def test_marks_that_are_special_tokens_are_these_tokens(pool, bytewise):
    number = bytewise.tokenizer.token_to_id(SPECIALS[0])
    syntax = replace(MISTRAL, opener=SPECIALS[0])
    assert f"<[{number}]>" in calls(bytewise, syntax, TOOLS, {}, several=False)[0]["lark_grammar"]
    made = grammars({"lark_grammar": f'start: <[{number}]> "[" "x" "]"'})
    grammar = await pool.compile_grammars(made, "x")
    assert follows(grammar, bytewise, "[x]", special=[number])
    assert not follows(grammar, bytewise, SPECIALS[0] + "[x]")


@pytest.mark.parametrize("kind", ["white space", "strings"])
async def test_every_kind_of_tokenizer_can_write_json(pool, text, kind):
    schema = {"type": "object", "properties": {"a": {"enum": [kind]}}, "required": ["a"]}
    grammar = await pool.compile_grammars(grammars(json_schema(schema)), "x")
    known = GrammarCompiler(text.vocab_size)
    known.set_vocabulary(vocabulary(text, text.vocab_size))
    constraint = known.constraint(SamplingParams(max_tokens=1, grammar=grammar, stop_token_ids=(0,)), 0)
    mask = constraint.allowed([])
    begun = [i for i in range(text.vocab_size) if mask[i // 8] >> i % 8 & 1]
    assert all(text.tokens[i].startswith(b"{") for i in begun)
    assert not text.tokens.special_ids.intersection(begun)


def either(*schemas):
    return {"anyOf": list(schemas)}


SELF = {"$ref": "#/$defs/a"}
MANY = [either(*({"properties": {f"a{i}{j}": {}}} for j in range(9))) for i in range(9)]
DOUBLED = "\n".join(f"{c}: {d} {d} {d}" for c, d in zip("abcdefgh", "bcdefghi", strict=True))
HOSTILE = [
    regex("(a{1000}){1000}"),
    regex("(.*a){400}b"),
    regex("(a|b)*a(a|b){5000}"),
    regex("(" * 3000 + ")" * 3000),
    choice([f"item{i}" * 20 for i in range(4000)]),
    json_schema({"allOf": MANY}),
    json_schema({"type": "array", "maxItems": 10**9, "items": {"type": "array", "maxItems": 10**9}}),
    json_schema({"type": "string", "pattern": "(a?){5000}a{5000}"}),
    json_schema({**SELF, "$defs": {"a": either(SELF, SELF)}}),
    written(f"start: a\n{DOUBLED}"),
    written('start: start start | start start start | "a"'),
    written('root ::= (((((("a"?)*)*)*)*)*)*'),
]


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_hostile_grammars_are_refused_or_followed_but_hold_up_nobody(pool, bytewise, hostile):
    started, refusal = time.monotonic(), None
    try:
        grammar = await pool.compile_grammars(grammars(hostile), "x")
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.status, refusal.code, refusal.param) == (400, "invalid_grammar", "x")
    else:
        used = time.thread_time()
        follows(grammar, bytewise, "a" * 40)
        assert time.thread_time() - used < 5  # a bound against hanging, not a timing
    assert time.monotonic() - started < 30
    assert await pool.compile_grammars(grammars(regex("a")), "x")


async def test_a_grammar_is_checked_once(monkeypatch):
    pool, jobs = GrammarPool(), []

    async def answer(job):
        jobs.append(job)
        return {"error": "no"} if b"bad" in job else {"grammar": "g"}

    monkeypatch.setattr(pool, "answer", answer)
    for _ in range(3):
        assert await pool.compile_grammars(grammars(regex("a")), "x") == "g"
        with pytest.raises(ApiError, match="no"):
            await pool.compile_grammars(grammars(regex("bad")), "x")
    assert len(jobs) == 4  # a refusal may be the machine's: it is tried again
    for number in range(MOST_REPLIES):
        await pool.compile_grammars(grammars(regex(f"a{number}")), "x")
    assert len(pool._replies) == MOST_REPLIES


async def test_a_flood_of_one_caller_delays_another_by_one_grammar(monkeypatch):
    pool, order = GrammarPool(), []

    async def attempt(frame, seconds):
        order.append(b"theirs" in frame)
        await asyncio.sleep(0)
        return {"grammar": "g"}

    monkeypatch.setattr(pool, "_try", attempt)

    async def compile_for(caller, pattern):
        TENANT.set(caller)
        await pool.compile_grammars(grammars(regex(pattern)), "x")

    flood = [compile_for("flooder", f"a{each}") for each in range(9)]
    await asyncio.gather(*flood, compile_for("other", "theirs"))
    assert order.index(True) == 1
    assert not pool._slots._held
    assert not pool._slots._waiting
