import asyncio
import time
from types import SimpleNamespace

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.gateway.open_request import OpenRequest
from llmbox.app.gateway.request_times import ExchangeClock
from llmbox.app.lifecycle.drain import Drain
from llmbox.engine.ipc.messages import RequestOutput


def ending(error: BaseException | None, drain: Drain | None = None) -> tuple[int, str, str]:
    """Status, code and reason of a request whose reader ends with `error`."""
    ends = []
    opened = OpenRequest(
        SimpleNamespace(prompts=[[1]], clock=ExchangeClock(), drain=drain),
        [],
        lambda request, *end: ends.append((*end, request.reason)),
        print,
    )
    kind = None if error is None else type(error)
    opened.__exit__(kind, error, None)
    return ends[0]


@pytest.mark.parametrize("error", [None, asyncio.CancelledError(), GeneratorExit(), ConnectionResetError()])
def test_a_reader_that_left(error):
    assert ending(error) == (499, "client_disconnected", "")


def test_a_request_that_the_end_of_the_daemon_cut_short():
    """It was logged as a client that left. While the drain lasts, a client may leave as before."""
    drain = Drain()
    drain.begin()
    assert ending(asyncio.CancelledError(), drain)[:2] == (499, "client_disconnected")
    drain.expired = True
    assert ending(asyncio.CancelledError(), drain)[:2] == (503, "shutting_down")


def test_an_answer_that_could_not_be_made_is_a_failure_of_the_server():
    """It was logged as a client that left."""
    assert ending(ValueError("inside"))[:2] == (500, "internal_error")
    assert ending(ApiError(502, "Too long.", "too_long")) == (502, "too_long", "Too long.")


def test_drafts_of_all_steps_are_counted():
    opened = OpenRequest(SimpleNamespace(prompts=[[1]], n=1, clock=ExchangeClock()), [], print, print)
    opened._limits = SimpleNamespace(has_tokens=True)
    for drafted, accepted in ((0, 0), (7, 3), (2, 2)):
        ids = [5] * (accepted + 1)
        output = RequestOutput(request_id="r", token_ids=ids, draft_tokens=drafted, accepted_tokens=accepted)
        opened._last = [None]
        opened._delta(SimpleNamespace(index=0, feed=lambda _: None), output)
    assert (opened.usage.draft_tokens, opened.usage.accepted_tokens) == (9, 5)


def open_with(output_tokens: int, clock: ExchangeClock) -> OpenRequest:
    generation = SimpleNamespace(
        **dict.fromkeys(("id", "endpoint", "key", "client", "stream")),
        prompts=[[1]], n=1, clock=clock, model=SimpleNamespace(name="m"),
    )  # fmt: skip
    sequence = SimpleNamespace(stream=SimpleNamespace(resumes=0), output_tokens=output_tokens)
    return OpenRequest(generation, [sequence], print, print)


def test_speed_is_told_once_it_means_something():
    """200 tokens a millisecond after the first were shown as 200,000 tokens a second."""
    opened = open_with(200, ExchangeClock())
    opened.timeline.first_token = time.monotonic() - 0.001
    assert opened.live().tokens_per_second is None
    opened.timeline.first_token = time.monotonic() - 4.0
    assert opened.live().tokens_per_second == pytest.approx(50.0, rel=0.2)


def test_the_first_token_is_counted_from_the_exchanges_begin():
    """Tokenizing and a load are part of what the client waited for."""
    clock = ExchangeClock(began=time.monotonic() - 100.0)
    opened = open_with(0, clock)
    opened.timeline.first_token = opened.timeline.submitted + 1.0
    live = opened.live()
    assert 100.0 <= live.age < 200.0
    assert live.ttft == opened.timeline.first_token - clock.began >= 101.0
