"""Answers that must follow a grammar: every one does, and none depends on how it was computed."""

import json
import re
from dataclasses import replace

import jsonschema_rs
import pytest

from llmbox.engine.core.constraints.output_constraint import (
    LOOP_TOKENS,
    GrammarCompiler,
    OutputConstraint,
)
from llmbox.engine.core.constraints.structured_output import GrammarState, GrammarVocabulary
from llmbox.engine.sampling_params import ThinkingParams
from support.grammars import (
    BREAK,
    CHOICE,
    EOS,
    JSON,
    REGEX,
    SCHEMA,
    TEXTS,
    THINK,
    THOUGHT,
    VOCABULARY,
    constrained,
    learned,
    text_of,
    wrapped,
)
from support.late_device import FakeCapture, device_engine
from support.mixes import told
from support.real_engines import ask, load, run, tokens
from support.tiny_models import make_tiny_model
from support.triton_interpreter import turn_on


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), tokenizer=False)


def limited():
    """Requests whose thoughts are ended by force, and one whose grammar begins at a trigger."""
    short = ThinkingParams(begins="inside", closer_ids=(THOUGHT,), end_ids=(THOUGHT,), budget=7)
    never = {THOUGHT: -90.0, EOS: -90.0}
    return [
        ask("budget", range(5, 12), 20, temperature=0.9, seed=3, thinking=short, logit_bias=never),
        constrained("both", CHOICE, thinking=short, logit_bias=never, seed=4),
        constrained("trigger", CHOICE, 60, triggers=('{"',), seed=5, logit_bias={TEXTS.index(b'{"'): 3.0}),
    ]


def mixed(count=12):
    """Requests with and without grammars, of all ways to draw."""
    ways = [
        {},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9},
        {"logprobs": 3, "repetition_penalty": 1.3},
        {"min_p": 0.1, "logit_bias": {TEXT_A: 5.0}},
        {"allowed_token_ids": tuple(range(320)), "bad_words": ((TEXT_A,),)},
    ]
    grammars = [JSON, REGEX, CHOICE, None]
    return limited() + [
        constrained(f"r{n}", grammars[n % 4], prompt=range(5, 12 + 3 * n), seed=n, **ways[n % len(ways)])
        if grammars[n % 4]
        else ask(f"r{n}", range(5, 12 + 3 * n), 20, temperature=0.9, seed=n, logprobs=2)
        for n in range(count)
    ]


KNOWN = tuple(range(len(TEXTS)))
TEXT_A = 3 + ord("a")


def answer(engine, request):
    outputs = run(engine, [request])[request.request_id]
    assert outputs[-1].finish_reason == "stop", outputs[-1]
    ids = [i for output in outputs for i in output.token_ids]
    assert ids[-1] == EOS
    return ids


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_answers_follow_their_grammar(model, kernels, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", kernels)
    engine = learned(load(model))
    validator = jsonschema_rs.validator_for(SCHEMA)
    seen = set()
    for seed in range(12):
        value = json.loads(text_of(answer(engine, constrained("json", JSON, seed=seed))))
        validator.validate(value)
        assert re.fullmatch(
            rb"[a-c]{2,4}-[0-9]{1,9}x", text_of(answer(engine, constrained("rx", REGEX, seed=seed)))
        )
        seen.add(text_of(answer(engine, constrained("choice", CHOICE, seed=seed))))
    assert len(seen) > 1
    assert seen <= {b"red", b"green", b"great"}


def test_greedy_answers_follow_too(model):
    assert text_of(answer(learned(load(model)), constrained("a", CHOICE, temperature=0.0))) in {
        b"red",
        b"green",
        b"great",
    }


OPTIONS = [
    {},
    {"max_running": 1},
    {"max_running": 3, "token_budget": 9},
    {"kv_tokens": 240, "context": 200, "block_size": 4},
    {"prefix_cache": False, "chunked_prefill": False},
]
NAMES = ["plain", "alone", "chunks", "preempted", "no cache"]


@pytest.fixture(scope="module")
def expected(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMBOX_KERNELS", "reference")
        return run(learned(load(model)), mixed())


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
@pytest.mark.parametrize("graphs", [None, False, True], ids=["in turn", "ahead", "graphs"])
def test_answers_depend_on_the_request_alone(model, expected, options, graphs, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    if graphs is None:
        engine = learned(load(model, **options))
    else:
        engine = learned(device_engine(model, capture=FakeCapture() if graphs else None, **options))
        while engine.prepare():
            pass
    seen = run(engine, mixed())
    assert {name: told(outputs) for name, outputs in seen.items()} == {
        name: told(outputs) for name, outputs in expected.items()
    }
    engine.scheduler.check()
    if "kv_tokens" in options:
        assert engine.stats().preemptions > 0


def test_only_requests_with_a_grammar_wait_for_their_tokens(model, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = learned(device_engine(model))
    engine.add(constrained("held", REGEX))
    engine.add(ask("free", range(5, 12), 8))
    steps = []
    while engine.has_work and len(steps) < 8:
        engine.step()
        if engine._launched:
            steps.append({row.request.request_id for row in engine._launched[-1][0].rows})
    assert sum("free" in step for step in steps) >= 7
    assert sum("held" in step for step in steps) == 4


def test_thoughts_are_ended_at_their_budget_or_in_a_loop(model):
    seen = tokens(learned(load(model)), limited())
    assert seen["budget"].index(THOUGHT) == 7
    assert len(seen["budget"]) == 20
    assert seen["both"].index(THOUGHT) == 7
    assert text_of(seen["both"][8:]).lstrip(b"\n") in {b"red", b"green", b"great"}


@pytest.mark.parametrize("ahead", [False, True])
def test_thoughts_that_go_round_are_ended(model, ahead, monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = learned((device_engine if ahead else load)(model))
    looping = ThinkingParams(begins="inside", closer_ids=(THOUGHT,), end_ids=(THOUGHT,), stop_loops=True)
    request = ask("a", range(5, 12), 235, temperature=0.0, thinking=looping, logit_bias={TEXT_A: 99.0})
    ids = tokens(engine, [request])["a"]
    assert ids == [TEXT_A] * LOOP_TOKENS + [THOUGHT] + [TEXT_A] * (235 - LOOP_TOKENS - 1)
    wanted = replace(request, params=replace(request.params, thinking=replace(looping, stop_loops=False)))
    assert tokens(engine, [wanted])["a"] == [TEXT_A] * 235


def test_a_trigger_switches_the_grammar_on(model):
    engine = learned(load(model))
    bias = {TEXTS.index(b'{"'): 4.0}
    lengths = set()
    for seed in range(8):
        ids = answer(
            engine,
            constrained(
                "a", CHOICE, 200, triggers=('{"',), seed=seed, logit_bias=bias, allowed_token_ids=KNOWN
            ),
        )
        said, _, rest = text_of(ids).partition(b'{"')
        assert rest in {b"red", b"green", b"great"}
        lengths.add(len(said))
    assert len(lengths) > 1


def test_a_trigger_that_is_spelled_takes_nothing_of_the_grammar_along(model):
    """A token that goes on after the trigger's end would skip the grammar's start."""
    engine = learned(load(model))
    request = constrained("a", CHOICE, 60, triggers=("</th",), logit_bias={3 + ord("h"): 60.0})
    ids = answer(engine, replace(request, output_ids=[3 + byte for byte in b"</t"]))
    assert text_of(ids[1:]) in {b"red", b"green", b"great"}


def test_an_answer_goes_on_without_a_grammar_that_it_cannot_follow_on_from_a_trigger(model):
    engine = learned(load(model))
    request = constrained("a", CHOICE, 12, triggers=("x",), stop_token_ids=(), seed=1)
    outputs = run(engine, [replace(request, output_ids=[3 + byte for byte in b"xz"])])["a"]
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("cut", [3, 7, 8, 12])
def test_resumed_thoughts_end_where_they_would_have(model, cut):
    for request in limited()[::2]:
        whole = tokens(learned(load(model)), [request])[request.request_id]
        rest = tokens(learned(load(model)), [replace(request, output_ids=whole[:cut])])[request.request_id]
        assert (whole[:cut] + rest)[: len(whole)] == whole


@pytest.mark.parametrize("cut", [1, 5, 17])
def test_a_resumed_answer_goes_on_as_it_would_have(model, cut):
    request = constrained("a", JSON, seed=3)
    whole = answer(learned(load(model)), request)
    rest = answer(learned(load(model)), replace(request, output_ids=whole[:cut]))
    assert whole[:cut] + rest == whole


def test_tokens_that_do_not_follow_fail_that_request_alone(model):
    engine = learned(load(model))
    wrong = replace(constrained("wrong", CHOICE), output_ids=[3 + ord("z")])
    seen = run(engine, [wrong, constrained("right", CHOICE)])
    assert seen["wrong"][-1].error_code == "grammar_error"
    assert "does not follow" in seen["wrong"][-1].error_message
    assert seen["right"][-1].finish_reason == "stop"
    assert not engine.has_work


def test_max_tokens_cuts(model):
    outputs = run(learned(load(model)), [constrained("a", JSON, 4)])["a"]
    assert outputs[-1].finish_reason == "length"
    assert sum(len(output.token_ids) for output in outputs) == 4


def test_a_broken_grammar_is_refused(model):
    engine = learned(load(model))
    outputs = run(engine, [constrained("a", wrapped({"lark_grammar": "start: nothing"}))])["a"]
    assert outputs[-1].error_code == "grammar_error"
    assert not engine.has_work


def test_one_that_grows_too_complex_fails_alone(model):
    """Every b doubles what may come: more states than a grammar may have."""
    grammar = wrapped({"lark_grammar": "start: /[ab]*a[ab]{400}c/"})
    engine = learned(load(model))
    seen = run(engine, [constrained("a", grammar, 180), constrained("b", CHOICE)])
    assert seen["a"][-1].finish_reason in {"error", "length"}
    assert seen["b"][-1].finish_reason == "stop"


def test_a_schema_that_only_refers_to_itself_is_named_as_such(model):
    outputs = run(learned(load(model)), [constrained("a", wrapped({"json_schema": {"$ref": "#"}}))])["a"]
    assert outputs[-1].error_code == "grammar_error"
    assert "'$ref' that leads only back to itself" in outputs[-1].error_message


def test_any_stop_token_ends_an_answer(model):
    engine = learned(load(model))
    ends = {
        run(engine, [constrained("a", CHOICE, seed=seed, stop_token_ids=(2, 1))])["a"][-1].stop_token_id
        for seed in range(12)
    }
    assert ends == {1, 2}


def test_thoughts_come_before_what_follows_the_grammar(model):
    engine = learned(load(model))
    bias = {THOUGHT: 9.0, BREAK: 1.0, EOS: 30.0}
    gaps = set()
    for seed in range(16):
        ids = answer(engine, constrained("a", CHOICE, 200, seed=seed, thinking="inside", logit_bias=bias))
        end = ids.index(THOUGHT)
        rest = ids[end + 1 :]
        gaps.add(rest[0] == BREAK)
        assert text_of(rest).lstrip(b"\n") in {b"red", b"green", b"great"}
    assert gaps == {True, False}


def test_an_answer_may_begin_with_thoughts(model):
    engine = learned(load(model))
    bias = {THOUGHT: 9.0, THINK: 3.0}
    kinds = set()
    for seed in range(16):
        ids = answer(engine, constrained("a", CHOICE, 200, seed=seed, thinking="may", logit_bias=bias))
        kinds.add(ids[0] == THINK)
        rest = ids[ids.index(THOUGHT) + 1 :] if ids[0] == THINK else ids
        assert text_of(rest).lstrip(b"\n") in {b"red", b"green", b"great"}
    assert kinds == {True, False}


def test_the_end_of_thoughts_takes_nothing_of_the_answer_along(model):
    """`>x` after `</think` would end the thoughts and begin the answer in one token."""
    spelled = tuple(3 + byte for byte in b"</think")
    engine = learned(load(model))
    request = constrained(
        "a", CHOICE, thinking="inside", logit_bias={TEXTS.index(b">x"): 90.0, 3 + ord(">"): 60.0}
    )
    ids = answer(engine, replace(request, output_ids=list(spelled)))
    assert ids[0] == 3 + ord(">")
    assert text_of(ids[1:]).lstrip(b"\n") in {b"red", b"green", b"great"}


def test_forks_have_grammars_of_their_own(model):
    engine = learned(load(model))
    first = constrained("a", JSON, seed=1, prompt=range(5, 40))
    alone = {n: tokens(learned(load(model)), [replace(first, request_id=n)])[n] for n in "ab"}
    assert tokens(engine, [first, replace(first, request_id="b", fork_of="a")]) == alone


@pytest.mark.slow
def test_the_kernels_of_a_gpu_draw_the_same(tmp_path, monkeypatch):
    """Rules, log-probabilities and rows without a grammar in the same step."""
    small = make_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=1)
    requests = [
        constrained("plain", CHOICE, 3),
        constrained("ruled", REGEX, 3, seed=2, logprobs=2, repetition_penalty=1.4, top_p=0.9),
        constrained("greedy", JSON, 3, temperature=0.0),
        ask("free", range(5, 12), 3, temperature=0.9, seed=3, logprobs=1, presence_penalty=0.5),
    ]
    options = {"dtype": "float32", "max_running": 4, "token_budget": 64}
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    wanted = run(learned(load(small, **options)), requests)
    turn_on()
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    engine = learned(device_engine(small, **options))
    assert engine.executor._ops.sample is not None
    seen = run(engine, requests)
    assert {name: told(outputs) for name, outputs in seen.items()} == {
        name: told(outputs) for name, outputs in wanted.items()
    }


RECORD = {"name": "abc", "age": 7, "ok": True, "tags": ["a", "a"]}
SPACED = wrapped({"json_schema": {**SCHEMA, "x-guidance": {"whitespace_pattern": r"( |\n[ ]{0,20})?"}}})


def constraint_of(grammar: str, **params) -> OutputConstraint:
    """Of a request whose prompt has two tokens."""
    compiler = GrammarCompiler(len(TEXTS))
    compiler.set_vocabulary(VOCABULARY)
    found = compiler.constraint(constrained("a", grammar, **params).params, 2)
    assert found is not None
    return found


def split(text: str) -> list[int]:
    vocabulary = GrammarVocabulary(VOCABULARY, len(TEXTS))
    return vocabulary.split(text.encode())


@pytest.mark.parametrize(
    ("style", "most_wrong"),
    [({}, 2), ({"separators": (",", ":")}, 5), ({"indent": 2}, 6), ({"indent": 4}, 8)],
    ids=["one line", "no spaces", "two", "four"],
)
def test_names_and_signs_are_guessed(style, most_wrong):
    """In the spaces that the answer has so far; nothing where there is a choice, nor what may not follow."""
    ids, right, wrong = split(json.dumps(RECORD, **style)), 0, 0
    constraint = constraint_of(SPACED)
    for place in range(len(ids)):
        so_far = [5, 6, *ids[:place]]
        guess = constraint.guess(so_far, 6)
        assert len(guess) <= 6
        assert constraint.count_allowed(so_far, guess) == len(guess)
        right += guess[:1] == ids[place : place + 1]
        wrong += bool(guess) and guess[0] != ids[place]
    assert right / len(ids) > 0.55
    assert wrong <= most_wrong, "where the style is not known yet"


def test_text_without_a_choice_is_guessed_whole():
    constraint = constraint_of(JSON)
    assert b"".join(TEXTS[token] for token in constraint.guess([5, 6], 15)) == b'{"name":"'
    assert constraint.guess([5, 6], 2) == split('{"name":"')[:2]
    assert constraint.guess([5, 6, *split('{"name":"')], 15) == [], "any text may follow"


def test_no_end_is_guessed():
    constraint = constraint_of(wrapped({"lark_grammar": 'start: "ab"'}))
    assert constraint.guess([5, 6], 15) == split("ab")
    assert constraint.guess([5, 6, *split("ab")], 15) == []


def test_special_tokens_are_guessed():
    constraint = constraint_of(wrapped({"lark_grammar": 'start: "ab" <[1]> "cd" /x|y/'}))
    assert constraint.guess([5, 6], 15) == [*split("ab"), 1, *split("cd")]


def test_a_guess_takes_few_masks(monkeypatch):
    """Each may cost twenty milliseconds, and a guess may be wrong each time."""
    masks, constraint = (
        list[bytes](),
        constraint_of(wrapped({"lark_grammar": 'start: "a" / *b *c *d *e *f *g *h *i *j *k/'})),
    )
    only_text = GrammarState._only_text
    monkeypatch.setattr(
        GrammarState, "_only_text", lambda self, *others: (masks.append(b""), only_text(self, *others))[1]
    )
    assert constraint.guess([5, 6], 15) == split("abcdefghi")
    assert len(masks) == 8


def test_the_forced_end_of_thoughts_is_guessed():
    thinking = ThinkingParams(begins="inside", closer_ids=(THOUGHT,), end_ids=(BREAK, THOUGHT), budget=2)
    constraint = constraint_of(CHOICE, thinking=thinking)
    assert constraint.guess([5, 6], 9) == constraint.guess([5, 6, 40], 9) == []
    assert constraint.count_allowed([5, 6, 40], split("nothing like it")) == len(split("nothing like it"))
    assert constraint.guess([5, 6, 40, 41], 9) == [BREAK, THOUGHT]
    assert constraint.guess([5, 6, 40, 41, BREAK, THOUGHT], 9) == [], "one of three words follows"
    assert constraint.guess([5, 6, 40, 41, BREAK, THOUGHT, *split("gr")], 9) == split("e")


def test_drafts_end_before_the_first_that_may_not_follow():
    constraint = constraint_of(JSON)
    assert constraint.count_allowed([5, 6], split('{"name":"abc","agx')) == len(split('{"name":"abc","ag'))
    assert constraint.count_allowed([5, 6], [EOS]) == 0
    assert constraint.allowed([5, 6]) == constraint_of(JSON).allowed([5, 6]), "asking changes nothing"
