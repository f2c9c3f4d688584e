"""Why the prefix cache gave no more of a prompt: told with the first output of every request."""

import pytest

from llmbox.engine.core.kv_cache.prefix_cache import PrefixHistory
from support.scheduling import make_request, make_scheduler, play_model


def first_output(scheduler, request):
    """Add a request, run it to its end, return what it was told first."""
    scheduler.add(request)
    outputs = []
    while scheduler.has_work:
        outputs += play_model(scheduler, scheduler.schedule())
        scheduler.check()
    told = next(output for output in outputs if output.request_id == request.request_id)
    return told.looked_up_tokens, told.cached_tokens, told.prefix_end


def test_a_prompt_that_nobody_sent_before_is_new():
    assert first_output(make_scheduler(), make_request("a", range(10))) == (8, 0, "new")


def test_the_same_prompt_again_is_complete():
    scheduler = make_scheduler()
    first_output(scheduler, make_request("a", range(10)))
    assert first_output(scheduler, make_request("b", range(10))) == (8, 8, "complete")


def test_the_block_of_the_last_token_is_not_looked_up():
    scheduler = make_scheduler()
    first_output(scheduler, make_request("a", range(8)))
    assert first_output(scheduler, make_request("b", range(8))) == (4, 4, "complete")


@pytest.mark.parametrize("changed", [4, 7])
def test_another_token_in_the_second_block_diverges_there(changed):
    scheduler = make_scheduler()
    first_output(scheduler, make_request("a", range(12)))
    other = [99 if i == changed else i for i in range(12)]
    assert first_output(scheduler, make_request("b", other)) == (8, 4, "diverged")


def test_less_than_a_block_before_the_last_token_is_short():
    assert first_output(make_scheduler(), make_request("a", range(4))) == (0, 0, "short")


def test_an_evicted_block_is_told_as_evicted():
    scheduler = make_scheduler(num_blocks=4)
    first_output(scheduler, make_request("a", range(9), max_tokens=1))
    first_output(scheduler, make_request("b", range(100, 114), max_tokens=1))
    assert first_output(scheduler, make_request("c", range(9), max_tokens=1)) == (8, 0, "evicted")


def test_a_tail_evicted_behind_a_cached_head():
    scheduler = make_scheduler(num_blocks=4)
    first_output(scheduler, make_request("a", range(9), max_tokens=1))
    first_output(scheduler, make_request("b", range(100, 111), max_tokens=1))
    assert first_output(scheduler, make_request("c", range(9), max_tokens=1)) == (8, 4, "evicted")


def test_another_namespace_is_told_and_nothing_of_it_shared():
    scheduler = make_scheduler()
    first_output(scheduler, make_request("a", range(10), namespace="one"))
    assert first_output(scheduler, make_request("b", range(10), namespace="two")) == (8, 0, "namespace")
    assert first_output(scheduler, make_request("c", range(10), namespace="two")) == (8, 8, "complete")
    assert first_output(scheduler, make_request("d", range(10), namespace="one")) == (8, 8, "complete")


def test_without_a_cache_it_is_off():
    scheduler = make_scheduler(cache=False)
    assert first_output(scheduler, make_request("a", range(10))) == (0, 0, "off")


def test_prompt_logprobs_need_the_whole_prompt():
    scheduler = make_scheduler()
    first_output(scheduler, make_request("a", range(10)))
    again = make_request("b", range(10), prompt_logprobs=1)
    assert first_output(scheduler, again) == (0, 0, "prompt_logprobs")


def test_a_resumed_request_tells_of_its_prompt_only():
    scheduler = make_scheduler()
    first_output(scheduler, make_request("a", range(20)))
    resumed = make_request("b", range(10), output=range(10, 19), max_tokens=12)
    assert first_output(scheduler, resumed) == (10, 10, "complete")


def test_memory_is_bounded_and_forgets_the_oldest():
    history = PrefixHistory(limit=3)
    for number in range(5):
        history.note_evicted(bytes([number]))
        history.note_first_block(bytes([number]), b"one" + bytes([number]))
    assert [history.why_absent(bytes([n]), None) for n in range(5)] == ["diverged"] * 2 + ["evicted"] * 3
    told = [history.why_absent(b"two" + bytes([n]), bytes([n])) for n in range(5)]
    assert told == ["new"] * 2 + ["namespace"] * 3


def test_what_is_evicted_again_is_young_again():
    history = PrefixHistory(limit=2)
    for name in (b"a", b"b", b"a", b"c"):
        history.note_evicted(name)
    assert [history.why_absent(name, None) for name in (b"a", b"b", b"c")] == [
        "evicted",
        "diverged",
        "evicted",
    ]
