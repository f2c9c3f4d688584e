"""One choice from ids to deltas: whatever the ids, they are the text of all, cut where it must be."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.app.gateway.choice_stream import REPEATS_CALLS, ChoiceStream
from llmbox.app.gateway.generation import Generation
from llmbox.app.text.stop_strings import CallMark, StopStrings
from llmbox.app.text.tokenizer.detokenizer import Detokenizer, TokenBytes, decode
from llmbox.engine.ipc.messages import RequestOutput, TokenLogprobs
from llmbox.engine.sampling_params import SamplingParams
from support.lanes import examples
from support.tokenizers_zoo import FAMILIES


class Text:
    def __init__(self, family: str) -> None:
        tokenizer = FAMILIES[family]()
        self.size = tokenizer.get_vocab_size()
        self.tokens = TokenBytes(tokenizer, json.loads(tokenizer.to_str())["decoder"])

    def detokenizer(self, **options) -> Detokenizer:
        return Detokenizer(self.tokens, **options)


TEXTS = {family: Text(family) for family in FAMILIES}


class Stream:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def sequence(
    family: str, *, stop=(), logprobs=None, min_tokens=0, max_tokens=None, call_mark=None
) -> ChoiceStream:
    params = SamplingParams(max_tokens=0, logprobs=logprobs, min_tokens=min_tokens)
    model = SimpleNamespace(text=TEXTS[family])
    generation = Generation(
        id="x",
        endpoint="/",
        model=model,
        prompts=[[1]],
        params=params,
        stop=stop,
        max_tokens=max_tokens,
        call_mark=call_mark,
    )
    return ChoiceStream(0, generation, Stream())


def outputs(ids: list[int], cuts: list[int], stop_token: int | None) -> list[RequestOutput]:
    """The ids in groups, as an engine may deliver them; the last group ends the sequence."""
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    groups = [ids[a:b] for a, b in itertools.pairwise(edges)] or [[]]
    made = [
        RequestOutput(
            request_id="x",
            token_ids=group,
            logprobs=[TokenLogprobs(token_id=i, logprob=-1.0, rank=1) for i in group],
            finish_reason=None if group is not groups[-1] else "length",
        )
        for group in groups
    ]
    if stop_token is None:
        return made
    final = RequestOutput(
        request_id="x",
        token_ids=[stop_token],
        logprobs=[TokenLogprobs(token_id=stop_token, logprob=-1.0, rank=1)],
        finish_reason="stop",
        stop_token_id=stop_token,
    )
    open_ended = [RequestOutput(request_id="x", token_ids=o.token_ids, logprobs=o.logprobs) for o in made]
    return [*open_ended, final]


def feed(subject: ChoiceStream, stream: list[RequestOutput]):
    deltas = []
    for output in stream:
        deltas.append(subject.feed(output))
        if subject.finish_reason is not None:
            break
    return deltas


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(200))
@given(data=st.data())
def test_deltas_are_the_text_of_all_ids(family, data):
    ids = data.draw(st.lists(st.integers(0, TEXTS[family].size + 2), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30), max_size=10))
    stop_token = data.draw(st.none() | st.integers(0, TEXTS[family].size - 1))
    stops = data.draw(st.lists(st.text("the 你\ufffd\n", min_size=1, max_size=4), max_size=3).map(tuple))
    with_logprobs = data.draw(st.sampled_from([None, 0]))

    whole = StopStrings(stops)
    text = whole.push(decode(TEXTS[family].tokens, ids)) if stops else decode(TEXTS[family].tokens, ids)
    text += whole.finish() if whole.matched is None else ""

    subject = sequence(family, stop=stops, logprobs=with_logprobs)
    deltas = feed(subject, outputs(ids, cuts, stop_token))
    assert "".join(delta.text for delta in deltas) == text
    assert subject.finish_reason == ("stop" if whole.matched or stop_token is not None else "length")
    if whole.matched:
        assert subject.stream.cancelled
    entries = [entry for delta in deltas for entry in delta.entries]
    if with_logprobs is not None and not whole.matched:
        assert [entry.logprobs.token_id for entry in entries] == ids
    assert all(entry.start <= len(text) for entry in entries)


def test_stop_strings_count_only_after_min_tokens():
    tokens = FAMILIES["byte_level"]().encode("the fox the fox the", add_special_tokens=False).ids
    subject = sequence("byte_level", stop=("fox",), min_tokens=len(tokens) // 2)
    assert "".join(d.text for d in feed(subject, outputs(tokens, [1, 2, 3], None))) == "the fox the "


def test_a_scoring_request_says_nothing():
    subject = sequence("byte_level", max_tokens=0)
    (delta,) = feed(subject, outputs([5], [], None))
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [], "length")
    assert subject.output_tokens == 0


def test_an_answer_that_repeats_a_call_ends_behind_it():
    tokenizer = FAMILIES[next(iter(FAMILIES))]()
    call = "<tool_call>\n{}\n</tool_call>"
    ids = tokenizer.encode(call * 200, add_special_tokens=False).ids
    subject = sequence(next(iter(FAMILIES)), call_mark=CallMark("</tool_call>"))
    deltas = feed(subject, outputs(ids, list(range(len(ids))), None))
    said = "".join(delta.text for delta in deltas)
    assert said == call * (len(said) // len(call))
    assert 4 <= len(said) // len(call) < 100
    assert subject.finish_reason == "stop"
    assert subject.stream.cancelled
    assert subject._remarks == [REPEATS_CALLS]
