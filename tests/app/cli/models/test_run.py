"""Pictures of `llmbox run`: files to a request's content, paths in a question, models that see nothing."""

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmbox.app.admin_client import AnswerPiece
from llmbox.app.cli.models import run
from llmbox.app.cli.models.run import ChatSession
from llmbox.app.errors import CliError, Exit
from llmbox.app.images.source import FILE_BYTES, read_image_url, split_image_paths
from support.cli_box import Box, box
from support.vision_models import draw_picture

__all__ = ["box"]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "a b.png"
    draw_picture(5, 4).save(file)
    return file


def session(**served: Any) -> ChatSession:
    model = {"name": "seeing", "chat": True, "info": {"image_problem": ""}, **served}
    return ChatSession(SimpleNamespace(client=None), model, None, {"seed": 1})


def test_a_picture_is_content_of_its_question_and_of_the_turns_after_it(
    picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []

    def stream_answer(_client: object, body: dict[str, Any], _opened: object) -> list[AnswerPiece]:
        sent.append(body)
        return [AnswerPiece(False, "yes")]

    monkeypatch.setattr(run, "stream_answer", stream_answer)
    talk = session()
    url = read_image_url(str(picture))
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == picture.read_bytes()
    talk.attach(url)
    talk.ask("What is it?")
    talk.ask("Really?")
    first, answer, second = sent[1]["messages"]
    assert first["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    assert (answer["content"], second["content"]) == ("yes", "Really?")


def test_pictures_of_a_question_that_fails_are_kept_and_told(
    picture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[list[dict[str, Any]]] = []
    answers: list[list[AnswerPiece | None]] = [[None], [None], [AnswerPiece(False, "a"), None], [None]]

    def stream_answer(_client: object, body: dict[str, Any], _opened: object) -> Iterator[AnswerPiece]:
        sent.append(list(body["messages"]))
        for piece in answers.pop(0):
            if piece is None:
                raise CliError("the request failed", "the box is busy", "ask again")
            yield piece

    typed = iter(
        [f"/image {picture}", "one", "/image", "two", f"/image '{picture}'", "three", "four", "/bye"]
    )
    monkeypatch.setattr(run, "stream_answer", stream_answer)
    monkeypatch.setattr(run, "_line_editing", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    talk = session()
    run._chat(SimpleNamespace(), talk)
    said = capsys.readouterr().err
    assert said.count("Kept for the next question: 1 image.") == 1
    shapes = [[type(message["content"]).__name__ for message in messages] for messages in sent]
    assert shapes == [["list"], ["str"], ["list"], ["list", "str", "str"]]
    assert sent[3][1] == {"role": "assistant", "content": "a"}
    talk.attach("data:image/png;base64,")
    answers[:] = [[None], [AnswerPiece(False, "b")]]
    with pytest.raises(CliError):
        talk.ask("five")
    talk.ask("six")
    assert [part["type"] for part in sent[-1][-1]["content"]] == ["image_url", "text"]
    assert talk.num_images == 0


@pytest.mark.parametrize("word", ["/bye", "/exit", "/quit"])
def test_a_chat_ends_by_the_words_of_other_programs_too(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter([word])  # a second question would raise StopIteration
    monkeypatch.setattr(run, "_line_editing", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    run._chat(SimpleNamespace(), session())


def test_a_model_that_sees_nothing_says_why() -> None:
    for served, why in (
        ({"info": {"image_problem": "it has no tower"}}, "no tower"),
        ({"chat": False}, "no chat template"),
    ):
        with pytest.raises(CliError) as refused:
            session(**served).attach("data:image/png;base64,")
        assert why in refused.value.why


def test_files_that_are_no_pictures_are_refused_by_name(tmp_path: Path) -> None:
    text, large = tmp_path / "text.png", tmp_path / "large.png"
    text.write_text("no picture")
    with large.open("wb") as file:
        file.truncate(FILE_BYTES + 1)
    for path, why in (
        (text, "not a PNG, JPEG, WebP or GIF"),
        (large, "more than 24 MiB"),
        (tmp_path, "directory"),
        (tmp_path / "none.png", "does not exist"),
        ("~nobody-of-this-name/a.png", ""),
        ("\0", ""),
    ):
        with pytest.raises(CliError) as refused:
            read_image_url(str(path))
        assert why in refused.value.why


def test_paths_of_pictures_in_a_question_are_found(picture: Path, tmp_path: Path) -> None:
    other = tmp_path / "c.JPG"
    other.touch()
    escaped = str(picture).replace(" ", "\\ ")
    for text, left, found in (
        (f"what is '{picture}' beside {other}?", "what is beside ?", [picture, other]),
        (f"{escaped} what", "what", [picture]),
        (f'"{picture}"', "", [picture]),
        (f"look at  {tmp_path}/none.png", f"look at  {tmp_path}/none.png", []),
        (f"{tmp_path} is a folder, 3/4 too", f"{tmp_path} is a folder, 3/4 too", []),
    ):
        assert split_image_paths(text) == (left, [str(each) for each in found])


def test_a_missing_file_needs_no_daemon(box: Box) -> None:
    refused = box.run("run", "builtin", "--image", "/nowhere/a.png", "What is it?")
    assert refused.code == Exit.NOT_FOUND
    assert "no file /nowhere/a.png" in refused.err
    assert box.running is None


def test_the_help_of_a_chat_breaks_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_more_input(_prompt: str) -> str:
        raise EOFError

    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("builtins.input", no_more_input)
    monkeypatch.setattr(run, "_line_editing", lambda _program: contextlib.nullcontext())
    run._chat(SimpleNamespace(), session())
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 50
    assert " ".join(lines).split() == run.HELP.split()
