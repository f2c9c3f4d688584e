"""Sentences about a record: what the prefix cache had, why prompt and answer are not there."""

import typing

import pytest

from llmbox.app.inspect.detail import content_note, describe_difference, prefix_note
from llmbox.app.store.record import Content, RequestRecord
from llmbox.engine.ipc.messages import PrefixMissReason


def record(**changes) -> RequestRecord:
    values = dict(id="r", created=0.0, model="m", endpoint="chat", http_status=200, prompt_tokens=100)
    return RequestRecord(**values | {"fingerprint": "fp"} | changes)


@pytest.mark.parametrize("end", typing.get_args(PrefixMissReason))
def test_every_end_has_its_sentence(end):
    note = prefix_note(record(prefix_end=end, looked_up_tokens=96, cached_tokens=32))
    assert note.startswith("Of 100 tokens of prompt 96 were looked up, 32 found. ")
    assert note.endswith(".")
    assert len(note) > 80, "a word of ours, not a sentence"


def test_nothing_is_said_where_the_cache_was_not_asked():
    assert prefix_note(record()) == ""
    assert prefix_note(record(prefix_end="off")) == "The prefix cache is off for this model."


def test_numbers_are_in_the_sentence():
    assert "The last 4 tokens are always computed" in prefix_note(
        record(prefix_end="complete", looked_up_tokens=96, cached_tokens=96)
    )
    assert "The first 32 tokens are shared with" in prefix_note(
        record(prefix_end="diverged", looked_up_tokens=96, cached_tokens=32)
    )
    assert "The beginning had been in the cache" in prefix_note(
        record(prefix_end="evicted", looked_up_tokens=96)
    )


def test_many_prompts_are_counted():
    note = prefix_note(record(prefix_end="new,complete,new", looked_up_tokens=96))
    assert note.endswith("3 prompts: 2 nothing like it, 1 all found.")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"key": "laptop"}, "The key laptop does not let"),
        ({"key": "(panel)"}, "requests.log_content"),
        ({}, "requests.log_content"),
        ({"content": "dropped"}, "disk or the queue"),
        ({"content": "kept"}, "after 7 days, by a purge"),
        ({"fingerprint": "", "error_code": "model_not_found"}, "refused before it reached a model"),
    ],
)
def test_why_there_is_no_content(changes, why):
    assert why in content_note(record(**changes), None, 7.0, foreign=False)


def test_what_is_there_needs_no_note_unless_it_was_cut():
    whole = Content(
        owner="", body="{}", body_bytes=2, prompts=["a"], prompt_bytes=1, outputs=["b"], output_bytes=1
    )
    assert content_note(record(content="kept"), whole, 7.0, foreign=False) == ""
    cut = Content(
        owner="", body="{}", body_bytes=2, prompts=["a"], prompt_bytes=9000, outputs=["b"], output_bytes=1
    )
    note = content_note(record(content="kept"), cut, 7.0, foreign=False)
    assert note == "Of the prompt 1 of 9,000 bytes were kept (requests.content_bytes)."


def test_tokens_from_disk_are_told_apart():
    note = prefix_note(record(prefix_end="complete", looked_up_tokens=96, cached_tokens=96, disk_tokens=64))
    assert "96 were looked up, 96 found (32 in memory, 64 on disk)." in note
    assert "disk" in prefix_note(record(prefix_end="late", looked_up_tokens=96))
    found = record(prefix_end="new", looked_up_tokens=96, cached_tokens=96, disk_tokens=32, host_tokens=48)
    assert "96 found (16 on the GPU, 32 on disk, 48 in main memory)." in prefix_note(found)


def kept(prompt: str, output: str = "", *, whole: int = 0) -> Content:
    return Content(
        owner="", body="", body_bytes=0, prompts=[prompt], prompt_bytes=whole or len(prompt.encode()),
        outputs=[output], output_bytes=len(output.encode()),
    )  # fmt: skip


def test_the_first_difference_is_that_from_the_earlier_prompt_that_shares_most():
    earlier = [("r3", kept("Now: 9:02. Be brief.")), ("r2", kept("Now: 9:01. Be kind.")), ("r1", kept("Hi"))]
    note = describe_difference(kept("Now: 9:01. Be brief."), earlier)
    assert note == ' It differs from request r2 first after "Now: 9:01. Be ": here "brief.", there "kind.".'
    assert "first at the beginning: here" in describe_difference(kept("Bye\n"), [("r1", kept("Hi"))])


def test_an_answer_that_came_back_changed_is_named():
    turn = kept("Q: 1? A: two Q: 2?")
    assert 'after "Q: 1? A: ": here "two Q: 2?", there "one"' in describe_difference(
        turn, [("r1", kept("Q: 1? A: ", "one"))]
    )
    assert describe_difference(turn, [("r1", kept("Q: 1? A: ", "two"))]) == ""
    assert describe_difference(turn, [("r1", kept("Q: 1?", "one", whole=900))]) == "", (
        "cut: no answer follows"
    )
    assert describe_difference(turn, []) == ""
