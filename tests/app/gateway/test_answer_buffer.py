from llmbox.app.gateway.choice_stream import AnswerBuffer
from llmbox.app.gateway.generation import Delta


def test_texts_are_gathered_by_choice_and_counted_in_bytes():
    transcript = AnswerBuffer(2, 100)
    for index, text in ((0, "grü"), (1, "b"), (0, "ße")):
        transcript.add(Delta(index, text, []))
    assert transcript.texts == ["grüße", "b"]
    assert transcript.size == 8


def test_what_nobody_keeps_is_counted_only():
    transcript = AnswerBuffer(1, 10)
    for _ in range(1000):
        transcript.add(Delta(0, "abcd", []))
    assert transcript.texts == ["abcd" * 3]
    assert transcript.size == 4000
