"""Measured queue of a model as `llmbox ps` and `llmbox show` say it."""

from llmbox.app.cli.models.models import _latency, _note

QUEUE = {
    "ttft": 0.25,
    "tpot": 0.04,
    "admitted": 0,
    "refused": 0,
    "missed": 0,
    "problem": "",
    "prompt_ratio": None,
    "prompt_share": 0.0,
    "disaggregate": "",
    "engines": "",
}


def test_a_model_that_is_not_measured():
    assert _latency(None) == {}
    assert _note({"info": None, "queue": None}) == ""
    assert _note({"info": None}) == ""  # a daemon that is older


def test_slower_kernels_are_told():
    info = {"generates": True, "kernels_problem": "c++ does not run"}
    assert _note({"info": info}) == "slower kernels run: c++ does not run"
    assert _note({"info": {**info, "kernels_problem": ""}}) == ""
    assert _note({"info": info, "queue": {**QUEUE, "problem": "too slow"}}).startswith("too slow; slower")


def test_measured_times():
    assert _latency(QUEUE) == {"a request now": "first token after 250 ms, a token every 40 ms"}


def test_what_targets_decided_and_prompts_cost():
    told = _latency(
        {
            **QUEUE,
            "admitted": 7,
            "refused": 2,
            "missed": 1,
            "problem": "too slow",
            "prompt_ratio": 3.44,
            "prompt_share": 0.125,
            "disaggregate": "1:3",
        }
    )
    assert told["by targets"] == "7 admitted, 1 of them late; 2 refused"
    assert told["targets"] == "too slow"
    assert told["prompts"] == (
        "steps with a prompt in them take 3.4 times as long (12.5% of the steps); "
        "--disaggregate 1:3 keeps them apart"
    )
    assert _note({"info": None, "queue": {**QUEUE, "problem": "too slow"}}) == "too slow"
    assert _latency({**QUEUE, "engines": "a pair 1:1: prompts"})["engines"] == "a pair 1:1: prompts"
