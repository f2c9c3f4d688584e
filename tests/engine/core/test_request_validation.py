"""Whatever a request holds: at worst it ends alone with an error, and its neighbors are undisturbed."""

import math
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmbox.engine.core.request import check_request
from llmbox.engine.errors import InvalidRequest
from llmbox.engine.ipc.channel import FrameReader, encode
from llmbox.engine.ipc.messages import (
    AddRequest,
    RequestOutput,
    StepOutputs,
    ToEngine,
    TokenLogprobs,
    Vocabulary,
)
from llmbox.engine.sampling_params import SamplingParams, ThinkingParams
from support.lanes import examples
from support.real_engines import ask, load, run
from support.tiny_models import VOCAB, make_tiny_model

Neighbor = {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.1}
NUMBERS = count()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = load(make_tiny_model(tmp_path_factory.mktemp("model")), max_running=4)
    letters = [bytes([i]) for i in range(256)] + [b""] * (VOCAB - 256)
    engine.set_vocabulary(
        Vocabulary(data=b"".join(letters), sizes=list(map(len, letters)), special=[256, 257])
    )
    return engine


@pytest.fixture(scope="module")
def undisturbed(engine):
    return ids_of(run(engine, [ask("n", range(3, 40), 24, **Neighbor)])["n"])


def ids_of(outputs):
    assert outputs[-1].finish_reason in {"length", "stop"}
    return [id_ for output in outputs for id_ in output.token_ids]


INTEGERS = st.one_of(
    st.integers(-3, VOCAB + 3),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**31) - 1, -(2**63)]),
)
GOOD_IDS = st.integers(0, VOCAB - 1)
IDS = st.one_of(st.lists(GOOD_IDS, max_size=40), st.lists(INTEGERS, max_size=4))
REALS = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.0, 1.0, 0.5, 2.0, 1e-45, 5e-324, 1e308, -1e308, math.nan, math.inf, -math.inf]),
)
GRAMMARS = st.sampled_from(
    [None, None, None, "", "{}", "[", '{"grammars": [{"lark_grammar": "start: /[a-z]+/"}]}', "\x00" * 9]
)


def or_default(strategy, default):
    return st.one_of(st.just(default), strategy)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.one_of(st.integers(0, 9), INTEGERS),
    seed=INTEGERS,
    temperature=or_default(REALS, 1.0),
    top_k=or_default(INTEGERS, 0),
    top_p=or_default(REALS, 1.0),
    min_p=or_default(REALS, 0.0),
    repetition_penalty=or_default(REALS, 1.0),
    presence_penalty=or_default(REALS, 0.0),
    frequency_penalty=or_default(REALS, 0.0),
    logit_bias=or_default(st.dictionaries(INTEGERS, REALS, max_size=3), {}),
    bad_words=or_default(st.lists(st.lists(INTEGERS, max_size=3).map(tuple), max_size=3).map(tuple), ()),
    allowed_token_ids=or_default(st.lists(INTEGERS, max_size=3).map(tuple), None),
    grammar=GRAMMARS,
    triggers=st.sampled_from([(), (), ("a",)]),
    thinking=st.none()
    | st.builds(
        ThinkingParams,
        begins=st.sampled_from(["no", "may", "inside", "x"]),
        closer_ids=st.sampled_from([(), (4,)]),
        end_ids=st.lists(INTEGERS, max_size=3).map(tuple),
        budget=st.none() | INTEGERS,
        stop_loops=st.booleans(),
        anywhere=st.booleans(),
    ),
    min_tokens=or_default(INTEGERS, 0),
    stop_token_ids=or_default(st.lists(INTEGERS, max_size=3).map(tuple), ()),
    logprobs=or_default(INTEGERS, None),
    prompt_logprobs=or_default(INTEGERS, None),
    pooling=st.sampled_from([None, None, None, "last", "mean", "cls"]),
)
REQUESTS = st.builds(
    AddRequest,
    request_id=st.text(max_size=3).map(lambda text: f"{text}{next(NUMBERS)}"),
    prompt_ids=IDS,
    params=PARAMS,
    output_ids=or_default(IDS, []),
    priority=INTEGERS,
    cache_namespace=st.text(max_size=3),
    fork_of=st.one_of(st.none(), st.just("n"), st.text(max_size=2)),
)


@given(st.lists(REQUESTS, min_size=1, max_size=4))
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_requests_end_alone(engine, undisturbed, requests):
    """Every one of them is answered to its end, and the engine and the request beside them go on."""
    neighbor = ask("n", range(3, 40), 24, **Neighbor)
    reader = FrameReader(ToEngine)
    (*received,) = reader.feed(b"".join(map(encode, [neighbor, *requests])))
    outputs = run(engine, received)
    assert ids_of(outputs["n"]) == undisturbed
    for request in requests:
        assert outputs[request.request_id][-1].finish_reason in {"stop", "length", "error"}
    engine.scheduler.check()
    assert engine.stats().blocks_used == 0


GOOD = ask("a", [5, 6], 4)
BAD = {
    "no_tokens": ({"prompt_ids": []}, {}, "no tokens"),
    "negative_id": ({"prompt_ids": [5, -1]}, {}, "token id -1 of the prompt"),
    "large_id": (
        {"prompt_ids": [VOCAB]},
        {},
        f"token id {VOCAB} of the prompt is not in the model's vocabulary of {VOCAB}",
    ),
    "large_output": ({"output_ids": [2**40]}, {}, "of the output so far"),
    "temperature": ({}, {"temperature": math.nan}, "temperature is nan"),
    "penalty": ({}, {"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
    "bias": ({}, {"logit_bias": {3: math.inf}}, "logit_bias"),
    "max_tokens": ({}, {"max_tokens": -1}, "max_tokens is -1"),
    "logprobs": ({}, {"logprobs": 2**40}, "logprobs is"),
    "stop_ids": ({}, {"stop_token_ids": (2**40,)}, "stop_token_ids"),
    "bad_words": ({}, {"bad_words": ((2**40, 1),)}, "bad_words"),
    "vector_with_output": ({}, {"pooling": "mean"}, "has no output"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(engine, case):
    fields, params, words = BAD[case]
    message = replace(GOOD, **fields, params=replace(GOOD.params, **params))
    with pytest.raises(InvalidRequest, match=words):
        check_request(message, engine.info)
    output = engine.add(message)
    assert (output.finish_reason, output.error_code) == ("error", "invalid_request")
    assert not engine.has_work


def test_log_probabilities_of_the_longest_prompt_fit_into_one_message(engine):
    def asked(tokens, alternatives):
        return replace(ask("a", [5], 1, prompt_logprobs=alternatives), prompt_ids=[5] * tokens)

    info = replace(engine.info, vocab_size=1 << 31)
    with pytest.raises(InvalidRequest, match=r"have room for a prompt of \d+ tokens") as error:
        check_request(asked(200_000, 20), info)
    most = int(str(error.value).split("prompt of ")[1].split()[0])
    assert most > 131_072
    check_request(asked(most, 20), info)
    with pytest.raises(InvalidRequest):
        check_request(asked(most + 1, 20), info)
    entry = TokenLogprobs(token_id=2**31 - 1, logprob=-0.1, rank=2**31 - 1, top=[(2**31 - 1, -0.1)] * 20)
    output = RequestOutput(request_id="a" * 99, token_ids=[5], prompt_logprobs=[None] + [entry] * (most - 1))
    encode(StepOutputs(outputs=[output], stats=engine.stats()))


def test_a_grammar_before_the_vocabulary_is_an_error(tmp_path):
    engine = load(make_tiny_model(tmp_path))
    assert engine.add(ask("a", [5], 4, grammar="{}")).error_code == "grammar_error"


def test_a_second_request_with_an_id_does_not_touch_the_first(engine, undisturbed):
    engine.add(ask("n", range(3, 40), 24, **Neighbor))
    assert engine.add(ask("n", [9], 2)) is None
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    assert ids_of(outputs) == undisturbed
