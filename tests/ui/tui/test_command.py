"""`llmbox top` as a program: no terminal, a real daemon in a pseudo-terminal, and a daemon that goes."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time

import pytest

from llmbox.app.errors import Exit
from support.cli_box import PATIENCE, Box, box, interrupt, until

__all__ = ["box"]


class Terminal:
    """A child in a pseudo-terminal, and all that it has written."""

    def __init__(
        self, box: Box, *arguments: object, size: tuple[int, int] = (120, 40), **environ: str
    ) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        environ = {**box.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1", **environ}
        self.child = subprocess.Popen(
            box.command(*arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environ,
            start_new_session=True,
        )
        self.output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while self.master >= 0:
            ready, _, _ = select.select([self.master], [], [], 0.1)
            if ready:
                try:
                    self.output += os.read(self.master, 65536)
                except OSError:
                    return

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?<>=]*[a-zA-Z]", "", self.output.decode("utf-8", "replace"))

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self) -> int:
        return self.child.wait(PATIENCE)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        master, self.master = self.master, -1
        self._reader.join(1)
        os.close(master)
        os.close(self.slave)


@pytest.fixture
def terminal(box):
    opened: list[Terminal] = []

    def start(*arguments: object, **options) -> Terminal:
        opened.append(Terminal(box, *arguments, **options))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_without_a_terminal_it_says_what_to_use_instead(box: Box):
    for command in ("top", "dash"):
        result = box.run(command)
        assert result.code == Exit.USAGE
        assert "llmbox stats" in result.err


def test_bad_flags(box: Box, terminal, tmp_path):
    for arguments, words in (
        (["--remote", "http://x"], "--key-file"),
        (["--replay", str(tmp_path / "none")], "does not exist"),
        (["--json"], "--once --json"),
        (["--seed", "3"], "--mock"),
        (["--mock", "--remote", "http://x", "--key-file", "k"], "exclude each other"),
        (["--once", "--record", str(tmp_path / "r")], "exclude each other"),
    ):
        result = box.run("top", *arguments)
        assert result.code == Exit.USAGE
        assert words in result.err
    empty = tmp_path / "empty"
    empty.write_text("")
    key = tmp_path / "key"
    key.write_text("short")
    for arguments, words in (
        (["--replay", str(empty)], "not a recording"),
        (["--record", str(tmp_path)], "cannot be written"),
        (["--remote", "ftp://x", "--key-file", str(key)], "is not a URL"),
        (["--remote", "http://127.0.0.1:1", "--key-file", str(key)], "holds no key"),
        (["--mock", "--theme", "nrd"], "did you mean nord?"),
    ):
        child = terminal("top", *arguments)
        if "--record" in arguments:
            assert child.ended() in {Exit.USAGE, Exit.UNREACHABLE}
        else:
            assert child.ended() == Exit.USAGE
            until(lambda child=child, words=words: words in child.text)


def test_no_daemon(terminal):
    child = terminal("top")
    assert child.ended() == Exit.UNREACHABLE
    until(lambda: "llmbox up" in child.text)


def test_a_daemon_under_load_in_a_real_terminal(box: Box, terminal, tmp_path):
    box.serve(box.model(step_delay=0.02, hold_at=100, script=[72, 73] * 2048))
    asking = [box.spawn("run", "tiny", "hello", "--max-tokens", "4000") for _ in range(2)]
    until(lambda: len(box.api("requests")["in_flight"]) == 2)
    recording = tmp_path / "recording"
    child = terminal("top", "--record", str(recording))
    until(lambda: "Tokens/s" in child.text and "2 in flight" in child.text)
    snapshot = json.loads(box.run("top", "--once", "--json").out)
    assert snapshot["schema"] == "llmbox.top/1"
    assert snapshot["requests"]["in_flight"] == len(snapshot["requests"]["live"]) == 2
    assert snapshot["models"][0]["model"] == "tiny"
    plain = box.run("top", "--once").out
    assert "2 in flight" in plain
    assert "\x1b" not in plain
    assert plain.isascii()  # TERM=dumb
    assert "█" in box.run("top", "--once", TERM="xterm").out
    child.press("\x1b[<0;36;1M\x1b[<0;36;1m")  # a click on the third tab
    until(lambda: "in memory" in child.text)
    child.press("7")
    until(lambda: "Enter sends" in child.text)
    child.press("Say it\r")
    until(lambda: "ijij" in child.text)  # tokens 72 and 73
    assert len(box.api("requests")["in_flight"]) == 3
    until(lambda: "ijij" in child.text)  # tokens 72 and 73
    assert len(box.api("requests")["in_flight"]) == 3
    child.press("\x1b")
    until(lambda: "Stopped." in child.text)
    until(lambda: len(box.api("requests")["in_flight"]) == 2)
    child.press("\x1b[<0;48;1M\x1b[<0;48;1m")  # the fifth tab
    until(lambda: "is ready" in child.text)
    child.press("2")
    until(lambda: "sorted by age" in child.text)
    child.press("x")
    until(lambda: "Sure?" in child.text)
    child.press("y")
    until(lambda: len(box.api("requests")["in_flight"]) == 1)
    child.press("q")
    assert child.ended() == 0
    until(lambda: b"\x1b[?1049l" in child.output)  # the terminal is given back
    assert termios.tcgetattr(child.slave) == child.before
    for each in asking:
        interrupt(each)
        each.communicate(timeout=PATIENCE)
    again = terminal("top", "--replay", str(recording))
    # A slow machine may draw only the recording's last moments.
    until(lambda: "replay" in again.text and re.search("[12] in flight", again.text))
    again.press("q")
    assert again.ended() == 0


def test_another_box_with_an_admin_key(box: Box, terminal, tmp_path):
    box.serve(box.model())
    key = tmp_path / "key"
    key.write_text(box.run("key", "add", "top", "--scope", "admin").out)
    url = f"http://127.0.0.1:{box.running.port}"
    child = terminal("top", "--remote", url, "--key-file", str(key))
    until(lambda: "No requests yet" in child.text)
    child.press("q")
    assert child.ended() == 0
    key.write_text("sk-llmbox-" + "x" * 43)
    refused = terminal("top", "--remote", url, "--key-file", str(key))
    assert refused.ended() == Exit.DENIED


def test_the_daemon_goes_and_comes_back(box: Box, terminal):
    daemon = box.serve(box.model())
    child = terminal("top")
    until(lambda: "No requests yet" in child.text)
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    until(lambda: "daemon gone" in child.text)
    at = len(child.text)
    box.serve(box.model())
    until(lambda: "no alerts" in child.text[at:])
    child.press("q")
    assert child.ended() == 0


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"PYTHONUTF8": "0", "LC_ALL": "C"}])
def test_poor_terminals(box: Box, terminal, environ):
    box.serve(box.model())
    child = terminal("top", size=(80, 24), **environ)
    until(lambda: "No requests yet" in child.text or "Devices" in child.text)
    child.press("q")
    assert child.ended() == 0
    colors = re.findall(rb"\x1b\[[0-9;]*38;2;(\d+);(\d+);(\d+)", child.output)
    if "PYTHONUTF8" not in environ:
        assert all(red == green == blue for red, green, blue in colors)
    if "NO_COLOR" not in environ:
        assert "█" not in child.text


def test_sigterm_gives_the_terminal_back(terminal):
    child = terminal("top", "--mock")
    until(lambda: "Devices" in child.text)
    child.child.send_signal(signal.SIGTERM)
    assert child.ended() == 128 + signal.SIGTERM
    until(lambda: child.output.count(b"\x1b[?1049l") == child.output.count(b"\x1b[?1049h") == 1)
    assert child.output.count(b"\x1b[?25l") == child.output.count(b"\x1b[?25h")


def test_a_terminal_that_closes(box: Box, terminal):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup` children would inherit that it is ignored
    box.serve(box.model())
    child = terminal("top")
    until(lambda: "Devices" in child.text)
    child.child.send_signal(signal.SIGHUP)
    deadline = time.monotonic() + PATIENCE
    while child.child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert box.api("status")["ready"]
