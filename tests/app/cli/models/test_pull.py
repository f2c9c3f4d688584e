"""The view of a download, while the daemon has no time for it and after it is gone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmbox.app.cli.models import pull
from llmbox.app.errors import CliError, Exit
from support.cli_call import Call, call, home

__all__ = ["call", "home"]

ROW = {"model": "org/m", "state": "downloading", "done": 1, "total": 2, "rate": 0, "eta_s": 0, "message": ""}


def busy_program(answers: list[Any]) -> Any:
    """A program whose daemon answers these in turn; an exception is raised."""

    def get(_path: str) -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"downloads": [answer]}

    return SimpleNamespace(client=SimpleNamespace(get=get), paths=SimpleNamespace(log_file="log"))


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "LOOK", 0.0)


def test_a_daemon_that_has_no_time_to_answer_does_not_end_the_view(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pull, "find_running", lambda _paths: object())
    silent = CliError("the daemon does not answer", exit=Exit.UNREACHABLE)
    answers = [silent, silent, {**ROW, "state": "ready", "done": 2}]
    pull._follow(busy_program(answers), ROW, as_json=False)
    assert answers == []
    assert "org/m is here" in capsys.readouterr().err


def test_a_daemon_that_is_gone_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "find_running", lambda _paths: None)
    gone = CliError("the daemon is not running", exit=Exit.UNREACHABLE)
    with pytest.raises(CliError, match="is not running"):
        pull._follow(busy_program([gone]), ROW, as_json=False)


@pytest.mark.parametrize(
    ("ref", "code", "hint"),
    [
        ("https://hub.example/org/m", Exit.USAGE, "did you mean org/m?"),
        ("org/m--x", Exit.USAGE, "llmbox search"),
        ("qwen3:4bb", Exit.NOT_FOUND, "did you mean qwen3:4b?"),
    ],
)
def test_a_word_that_names_no_model_is_refused_before_a_daemon_starts(
    call: Call, ref: str, code: Exit, hint: str
) -> None:
    done = call("pull", ref)
    assert (done.code, hint in done.err) == (code, True), done.err


def test_a_folder_of_this_disk_is_loaded_not_pulled(call: Call, tmp_path: Path) -> None:
    done = call("pull", tmp_path)
    assert (done.code, f"llmbox load {tmp_path}" in done.err) == (Exit.USAGE, True), done.err
