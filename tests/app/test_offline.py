"""`LLM` in a program of its own: the API's tokens and errors, and nothing left behind."""

import gc
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import llmbox
from llmbox.app.offline import LLMError, LLMWarning
from support.tiny_models import make_tiny_model

GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("offline") / "tiny")


@pytest.fixture(scope="module")
def llm(directory):
    with llmbox.LLM(str(directory), threads=1, memory=0.3, ctx=128) as opened:
        yield opened


def test_prompts_are_answered_in_order(llm):
    prompts = ["one", [5, 6, 7], "two", "one"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert all(len(output.outputs[0].token_ids) == 6 for output in outputs)
    assert outputs[0].outputs[0] == outputs[3].outputs[0]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert outputs[0].usage["completion_tokens"] == 6


def test_one_prompt_needs_no_list(llm):
    (text,) = llm.generate("one", GREEDY)
    (ids,) = llm.generate(text.prompt_token_ids, GREEDY)
    assert text.outputs[0].text == ids.outputs[0].text


def test_keywords_and_choices(llm):
    (output,) = llm.generate("one", {"max_tokens": 4}, n=3, seed=7, temperature=1.0, logprobs=1)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert output.outputs[0].logprobs["tokens"]
    (again,) = llm.generate("one", {"max_tokens": 4}, n=3, seed=7, temperature=1.0)
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in output.outputs]


def test_more_prompts_than_a_queue_holds(llm):
    outputs = llm.generate([[5, 6, 7 + number % 5] for number in range(600)], {**GREEDY, "max_tokens": 1})
    assert len(outputs) == 600
    assert outputs[0].outputs[0].token_ids == outputs[595].outputs[0].token_ids
    assert llm._services.request_log._queue.qsize() < 10, "nobody reads a log of them"


def test_chats(llm):
    hello = [{"role": "user", "content": "hello"}]
    (alone,) = llm.chat(hello, GREEDY)
    both = llm.chat([hello, [*hello, {"role": "assistant", "content": "yes"}, *hello]], GREEDY)
    assert alone.outputs[0].message["role"] == "assistant"
    assert len(both[0].prompt_token_ids) < len(both[1].prompt_token_ids)
    assert both[0].outputs[0].token_ids == alone.outputs[0].token_ids


def test_vectors(llm):
    one, other, again = llm.embed(["one", "other", "one"])
    assert one == again != other
    assert sum(x * x for x in one) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop": object()}, "not JSON"),
        ({"max_tokens": 10_000}, "context"),
    ],
)
def test_bad_fields_are_refused(llm, fields, reason):
    with pytest.raises(LLMError, match=reason) as caught:
        llm.generate(["one", "two"], fields)
    assert caught.value.status == 400
    assert llm.generate("one", GREEDY)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("org/nothing-here", {}, "is not on this disk"),
        ("builtin", {"quantt": "int8"}, "unknown key model.quantt"),
        ("builtin", {"quant": "int7"}, "quant"),
        ("builtin", {"ctx": 1 << 20}, "context"),
    ],
)
def test_what_cannot_be_loaded_says_why(model, options, reason):
    with pytest.raises(LLMError, match=reason):
        llmbox.LLM(model, **options)


@pytest.mark.parametrize(
    ("model", "options", "hint"),
    [
        ("org/absent", {}, "llmbox pull org/absent"),
        ("builtin", {"quant": "int9"}, "int8"),
        ("builtin", {"ctxx": 512}, "did you mean model.ctx"),
    ],
)
def test_an_error_holds_the_reason_and_the_next_step(model, options, hint):
    with pytest.raises(LLMError, match="cannot load") as caught:
        llmbox.LLM(model, **options)
    assert hint in str(caught.value)


SCRIPT = """
import llmbox, sys
llm = llmbox.LLM(sys.argv[1], threads=1, memory=0.3, ctx=128)
print(llm._folder.name, *llm._services.engines.models()[0].supervisor.pids)
print(llm.generate("one", max_tokens=3, ignore_eos=True)[0].outputs[0].token_ids)
"""


def test_an_unknown_field_is_told(llm):
    with pytest.warns(LLMWarning, match="max_tokns"):
        llm.generate("one", GREEDY, max_tokns=3)


def test_a_program_that_just_ends_leaves_nothing(directory):
    """No guard of the main module, no `close`: the engine ends and the folder goes."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(directory)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    (folder, *pids), ids = done.stdout.splitlines()[0].split(), done.stdout.splitlines()[1]
    assert len(ids.split(",")) == 3
    assert not Path(folder).exists()
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_a_closed_one_says_so(directory):
    llm = llmbox.LLM(str(directory), threads=1, memory=0.3, ctx=128)
    llm.close()
    llm.close()
    with pytest.raises(LLMError, match="closed"):
        llm.generate("one")
    gc.collect()
