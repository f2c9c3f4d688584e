"""Times of an answer, as Ollama's clients read them: nanoseconds."""

from types import SimpleNamespace

from llmbox.app.gateway.generation import TokenUsage
from llmbox.app.gateway.open_request import Timeline
from llmbox.app.gateway.request_times import ExchangeClock
from llmbox.app.http.ollama.responder import AnswerWriter

SECOND = 10**9


def test_a_load_is_told_and_is_part_of_the_total() -> None:
    timeline = Timeline(1000.0, began=10.0, submitted=13.0, scheduled=14.0, first_token=16.0, last_token=20.0)
    usage = TokenUsage(prompt_tokens=7, output_tokens=5)
    sequence = SimpleNamespace(finish_reason="stop")
    opened = SimpleNamespace(timeline=timeline, usage_now=lambda: usage, sequences=[sequence])
    call = SimpleNamespace(
        parsing=SimpleNamespace(includes_reasoning=False),
        generation=SimpleNamespace(clock=ExchangeClock(began=10.0, model_s=2.5)),
        prepared=SimpleNamespace(warnings_at_end=lambda _: []),
        has_logprobs=False,
    )
    end = AnswerWriter("generate", "m", opened, call).end(SimpleNamespace(content="", reasoning="", calls=[]))
    assert end["total_duration"] == 10 * SECOND
    assert end["load_duration"] == 2.5 * SECOND
    assert end["prompt_eval_duration"] == 2 * SECOND
    assert end["eval_duration"] == 4 * SECOND


def test_an_answer_of_one_token_has_a_time_to_divide_by() -> None:
    timeline = Timeline(1000.0, began=1.0, submitted=1.0, scheduled=1.0, first_token=2.0, last_token=2.0)
    sequence = SimpleNamespace(finish_reason="length")
    usage = TokenUsage(prompt_tokens=7, output_tokens=1)
    opened = SimpleNamespace(timeline=timeline, usage_now=lambda: usage, sequences=[sequence])
    call = SimpleNamespace(
        parsing=SimpleNamespace(includes_reasoning=False),
        generation=SimpleNamespace(clock=ExchangeClock(began=1.0, model_s=0.0)),
        prepared=SimpleNamespace(warnings_at_end=lambda _: []),
        has_logprobs=False,
    )
    end = AnswerWriter("generate", "m", opened, call).end(SimpleNamespace(content="", reasoning="", calls=[]))
    assert (end["eval_count"], end["eval_duration"]) == (1, 1)
