"""`llmbox run`: answers on stdout only, and a chat in a real (pseudo) terminal."""

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator

import pytest

from llmbox.app.errors import Exit
from support.cli_box import PATIENCE, Box, box, interrupt, until
from support.tokenizers_zoo import CHATML, byte_level, drawn_ids, write_text_files

__all__ = ["box"]

ANSWER = "ijijij"


class Terminal:
    """A command at the slave end of a pseudo terminal."""

    def __init__(self, command: list[str], environ: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str) -> str:
        """Output up to and with the pattern; what came before is forgotten."""
        deadline = time.monotonic() + PATIENCE
        while not (match := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"waited for {pattern!r}, got {self.seen!r}"
            try:
                self.seen += os.read(self._master, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                pytest.fail(f"ended while waiting for {pattern!r}: {self.seen!r}")
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def chat(box: Box) -> Iterator[Terminal]:
    box.serve(box.model(script=[72, 73] * 2048, step_delay=0.01))
    environ = {**box.environ, "TERM": "xterm", "INPUTRC": "/dev/null"}
    terminal = Terminal(box.command("run", "tiny", "--max-tokens", "6"), environ)
    yield terminal
    terminal.close()


def test_without_a_model_it_offers_what_suits_this_machine(box: Box):
    nobody = box.run("run", stdin="")
    assert nobody.code == Exit.USAGE
    assert "which model?" in nobody.err
    terminal = Terminal(box.command("run", "--max-tokens", "6"), {**box.environ, "TERM": "xterm"})
    try:
        offered = terminal.expect(r"Which model\? \[\d\]:")
        assert re.search(r"1  builtin +on this disk", offered)
        assert re.search(r"\d  \S+:\S+ +(quick|balanced|best|smallest): fetch .* at 10\.0 MB/s", offered)
        terminal.type("1\n")
        terminal.expect(">>> ")
    finally:
        terminal.close()


def test_one_shot_starts_the_daemon_and_says_so(box: Box):
    model = box.model(script=[72, 73] * 2048)
    first = box.run("run", model, "hello", "you", "--max-tokens", "6")
    assert (first.code, first.out) == (0, f"{ANSWER}\n")
    assert "starting it" in first.err
    second = box.run("run", "tiny", "--max-tokens", "6", stdin="hello from a pipe\n")
    assert (second.code, second.out, second.err) == (0, f"{ANSWER}\n", "")
    nothing = box.run("run", "tiny", stdin="")
    assert nothing.code == Exit.USAGE
    refused = box.run("run", "tiny", "hello", "--max-tokens", "100000")
    assert refused.code == Exit.FAILED
    assert refused.out == ""
    assert "context" in refused.err


def test_a_model_without_a_chat_template_continues_text(box: Box):
    model = box.model(script=[72, 73] * 2048)
    settings = model / "tokenizer_config.json"
    settings.write_text(
        re.sub(r'"chat_template": "(\\.|[^"\\])*"', '"chat_template": null', settings.read_text())
    )
    result = box.run("run", model, "once upon", "--max-tokens", "6")
    assert (result.code, result.out) == (0, f"{ANSWER}\n")


def test_a_chat_in_a_terminal(box: Box, chat: Terminal):
    chat.expect(">>> ")
    chat.type("hello\n")
    chat.expect(ANSWER)
    chat.expect(">>> ")
    chat.type("/image /nowhere.png\n")
    chat.expect("no file /nowhere.png")
    chat.expect(">>> ")
    chat.type("/help\n")
    chat.expect("/bye")
    chat.expect(">>> ")
    interrupt(chat.process)
    chat.expect("ends the chat")
    chat.expect(">>> ")
    chat.type("/bye\n")
    assert chat.process.wait(timeout=PATIENCE) == 0
    assert "hello" in box.paths.history_file.read_text()
    assert box.paths.history_file.stat().st_mode & 0o077 == 0
    until(lambda: box.api("requests")["requests"])
    (row,) = box.api("requests")["requests"]
    assert row["finish_reasons"] == "length"


def test_ctrl_c_stops_an_answer_and_the_request_behind_it(box: Box):
    box.serve(box.model(script=[72, 73] * 2048, hold_at=9))
    chat = Terminal(box.command("run", "tiny", "--max-tokens", "4000"), {**box.environ, "TERM": "xterm"})
    try:
        chat.expect(">>> ")
        chat.type("hello\n")
        chat.expect("ij")
        interrupt(chat.process)
        chat.expect("stopped")
        chat.expect(">>> ")
        chat.type("\x04")
        assert chat.process.wait(timeout=PATIENCE) == 0
        until(lambda: not box.api("status")["open_requests"])
    finally:
        chat.close()


def test_thoughts_are_shown_to_people_and_are_no_part_of_the_answer(box: Box):
    tokenizer = byte_level()
    script = tokenizer.encode("<think>\nhm\n</think>\n\nyes").ids
    model = box.model(script=script, **drawn_ids(tokenizer))
    write_text_files(model, tokenizer, CHATML + "{#- </think> -#}")
    assert box.run("run", model, "hello").out == "yes\n"
    short = box.run("run", "tiny", "hello", "--max-tokens", "4")
    assert (short.code, short.out) == (0, "")
    assert "--max-tokens" in short.err
    chat = Terminal(box.command("run", "tiny", "hello"), {**box.environ, "TERM": "xterm"})
    try:
        assert "\x1b[2mhm\x1b[0m" in chat.expect("yes").replace("\x1b[0m\x1b[2m", "")
    finally:
        chat.close()
