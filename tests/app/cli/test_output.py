import io
import json
import os
import sys

import pytest

from llmbox.app.cli import output
from llmbox.app.errors import CliError, Exit
from llmbox.app.util import formatting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_errors_have_four_lines_without_control_characters(capsys: pytest.CaptureFixture[str]):
    output.print_error(CliError("what\x1b[2J", "why", "fix", Exit.FAILED, "/log"))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["Error: what\\x1b[2J", "  Why: why", "  Try: fix", "  Log: /log"]


def test_tables_align_and_are_cut_to_columns(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    output.table(("NAME", "N"), [("a", 1), ("b" * 30, 22)], right=(1,))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 20 for line in lines)
    monkeypatch.delenv("COLUMNS")
    output.table(("NAME", "N"), [("a", 1), ("b" * 30, 22)], right=(1,))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "a" + " " * 32 + "1"
    assert lines[2].startswith("b" * 30)


def test_long_texts_lose_their_middle_before_columns_are_cut(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    output.table(("ID", "KEY", "N"), [("chatcmpl-0123456789abcdef-0042", "shop", 1234567)], right=(2,))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("N")
    assert "…" in lines[1]
    assert lines[1].startswith("chatcmpl-")
    assert lines[1].endswith("-0042  shop  1234567")
    assert len(lines[1]) == 40


def test_json_is_one_line_with_a_schema(capsys: pytest.CaptureFixture[str]):
    output.write_json("thing", {"a": "ü\x1b"})
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert json.loads(text) == {"schema": "llmbox.thing/1", "a": "ü\x1b"}


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_color_can_be_refused(monkeypatch: pytest.MonkeyPatch, variable: str, value: str):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert output.has_color(Terminal())
    monkeypatch.setenv(variable, value)
    assert not output.has_color(Terminal())
    assert not output.has_color(io.StringIO())


def test_progress_without_a_terminal_is_a_line_ever_more_rarely(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    line = output.ProgressLine()
    for second in range(300):
        now = 100.0 + second
        line.update(f"second {second}")
    line.close()
    seconds = [0, 5, 15, 35, 75, 135, 195, 255]
    assert capsys.readouterr().err.splitlines() == [f"second {each}" for each in seconds]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (1.2e12, "1.20 TB")],
)
def test_sizes(value: float | None, text: str):
    assert formatting.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.012, "12 ms"),
        (3.2, "3.2 s"),
        (65, "1 min 5 s"),
        (3700, "1 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_spans(value: float | None, text: str):
    assert formatting.span(value) == text


def test_a_follower_notices_that_its_reader_is_gone(monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        output.require_reader()
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            output.require_reader()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    output.require_reader()  # no file: nothing to ask
