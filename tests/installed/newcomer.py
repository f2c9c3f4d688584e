"""From an empty machine to a chat with a pulled model, timed: `make newcomer`.

A wheel goes into a new environment with an empty home. Then a newcomer's way is walked twice: in a terminal,
and in the panel with a browser. The hub is on loopback; under the name of a recommended model it has the
files of the built-in one, so the seconds hold no download over a network.

A decision is a thing to choose or to type. A click on the only button of a page is none. The exit code is 1
where a way needs more than three.
"""

import argparse
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmbox.app.models.catalog import BUILTIN_DIR
from llmbox.app.models.registry import recommended
from llmbox.engine.hardware.machine import read_machine
from llmbox.kernels.cpu.isa import KERNEL_CACHE, usable_levels
from support.browser import CHROMIUM, FLAGS
from support.hub_stub import StubRepo, stub_hub
from support.installed_box import InstalledBox, build_wheel, install, pins

QUESTION = "What is a KV cache?"
PATIENCE = 300.0
"""Seconds until a step counts as failed."""
MOST_DECISIONS = 3


@dataclass
class Way:
    """One way from a shell's prompt to an answer: what was decided, and seconds by step."""

    name: str
    decisions: list[str] = field(default_factory=list)
    steps: list[tuple[str, float]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    def decide(self, what: str) -> None:
        self.decisions.append(what)

    def done(self, step: str) -> None:
        """End a step: its time is what passed since the one before."""
        now = time.perf_counter()
        self.steps.append((step, now - self._began))
        self._began = now

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.steps)


class Terminal:
    """A command in a terminal, as a person sees it."""

    def __init__(self, box: InstalledBox, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self._child = subprocess.Popen(
            [str(box.env / "bin/llmbox"), *words],
            env={**box.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
            cwd=box.home,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""

    def read_until(self, wanted: str) -> str:
        """Return what is shown up to a pattern that has not been read yet."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(wanted, self.shown)) is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{wanted!r} was not shown in {PATIENCE:.0f} s, but:\n{self.shown}")
            if select.select([self._ours], [], [], 0.2)[0]:
                try:
                    self.shown += os.read(self._ours, 65_536).decode("utf-8", "replace")
                except OSError:
                    raise SystemExit(f"it ended before {wanted!r} was shown:\n{self.shown}") from None
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def close(self) -> None:
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(30)
        os.close(self._ours)


def walk_terminal(box: InstalledBox) -> Way:
    way = Way("terminal")
    offered = re.findall(r"llmbox run (\S+) +\w+: fetch", box.run().out)
    way.done("llmbox: it names the next step")
    way.decide(f"one of {len(offered)} choices: llmbox run {offered[0]}")
    chat = Terminal(box, "run", offered[0])
    try:
        chat.read_until(r"\[y/N\]:")
        way.done("the question with size and time")
        way.decide("y: download it")
        chat.type("y")
        chat.read_until(">>> ")
        way.done("download, start of the daemon, load")
        way.decide(f"a message: {QUESTION}")
        chat.type(QUESTION)
        answer = chat.read_until(r"\n>>> ").partition("\n")[2].rpartition("\n")[0]
        way.done("the answer")
        assert len(answer.split()) > 3, answer
        chat.type("/bye")
    finally:
        chat.close()
        box.run("down", "--now")
    return way


def walk_panel(box: InstalledBox) -> Way:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        way = Way("panel")  # the browser is open already, as a person's is
        try:
            way.decide("llmbox up")
            link = box.json("up")["sign_in"]
            way.done("llmbox up: daemon and built-in model")
            page.goto(link)
            page.get_by_role("button", name="Sign in").click()
            page.get_by_role("link", name="First steps").first.click()
            offered = page.locator(".tile.model").filter(has=page.get_by_role("button", name="Download "))
            offered.first.wait_for()
            way.done("sign in, first steps")
            way.decide(f"one of {offered.count()} choices: {offered.first.locator('h3').inner_text()}")
            offered.first.get_by_role("button", name="Download ").click()
            page.get_by_role("link", name="Chat", exact=True).and_(page.locator(".button")).click()
            page.wait_for_load_state()  # its scripts have run: Enter sends
            way.done("download")
            way.decide(f"a message: {QUESTION}")
            page.locator("#prompt").fill(QUESTION)
            page.locator("#prompt").press("Enter")
            page.locator(".message.assistant .measure").get_by_text("tokens/s").wait_for()
            way.done("load and answer")
        finally:
            browser.close()
            box.run("down", "--now")
    return way


def empty_box(folder: Path, environment: Path, hub_url: str) -> InstalledBox:
    """A home with nothing in it: kernels come from the wheel, or are compiled there."""
    os.environ[KERNEL_CACHE] = str(folder / "none")
    return InstalledBox(folder / "home", environment, hub_url)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="take this wheel instead of building one of this tree")
    parser.add_argument("--environment", type=Path, help="llmbox is installed in this environment already")
    parser.add_argument("--ways", nargs="+", choices=("terminal", "panel"), default=["terminal", "panel"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    given = parser.parse_args()
    walks: dict[str, Callable[[InstalledBox], Way]] = {"terminal": walk_terminal, "panel": walk_panel}
    with tempfile.TemporaryDirectory(prefix="llmbox-newcomer-") as name, stub_hub() as hub:
        folder = Path(name)
        files = {file.name: file.read_bytes() for file in BUILTIN_DIR.iterdir() if file.is_file()}
        hub.repos |= {each.repo: StubRepo(files) for each in recommended()}
        environment, installed = given.environment, 0.0
        if environment is None:
            level = usable_levels()[0].name
            wheel = given.wheel or build_wheel(folder, kernels=level)
            began = time.perf_counter()
            environment = install(wheel, folder / "env", pins())
            installed = time.perf_counter() - began
        ways = [walks[each](empty_box(folder / each, environment, hub.url)) for each in given.ways]
    report(ways, installed, given.json)
    return int(any(len(way.decisions) > MOST_DECISIONS for way in ways))


def report(ways: list[Way], installed: float, file: Path | None) -> None:
    cpu = read_machine().cpu
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": f"{cpu.model}, {cpu.cores} cores",
        "install_s": round(installed, 1),
    }
    print(f"{facts['date']}, {facts['cpu']}; install {installed:.1f} s (not counted below)")
    for way in ways:
        print(f"\n{way.name}: {way.seconds:.1f} s, {len(way.decisions)} decisions")
        for decision in way.decisions:
            print(f"  decision  {decision}")
        for step, seconds in way.steps:
            print(f"  {seconds:6.1f} s  {step}")
    if file is not None:
        told = [{**asdict(way), "seconds": way.seconds} for way in ways]
        file.write_text(json.dumps({**facts, "ways": told}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
