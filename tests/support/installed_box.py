"""llmbox as its users have it: a wheel in an environment that holds runtime dependencies and nothing else.

Nothing of that environment is imported here. Its commands run as processes, in a home of their own.
"""

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from llmbox.app.cli.root import COMMANDS
from llmbox.kernels.cpu.isa import KERNEL_CACHE
from support.cli_box import PATIENCE, Result, until

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "packaging/constraints.txt"
KERNELS = ".cache/llmbox/kernels"
INHERITED = ("LANG", "TZ", "TMPDIR", "CXX")
HELD = {"torch"}
"""Not taken at the lowest version: see pyproject.toml."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    return {normal(name): version for name, version in lines}


def floors() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {normal(name): floor for name, floor in (each.split(">=") for each in project["dependencies"])}


def lowest_versions() -> dict[str, str]:
    """Of what pyproject.toml names its floor; of the rest what is pinned, so that no new release decides."""
    return pins() | {name: floor for name, floor in floors().items() if name not in HELD}


def checked(command: Sequence[object], **environ: str) -> str:
    """The output of a command that must succeed, and finds no package by a variable of ours."""
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(list(map(str, command)), env=env | environ, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def build_wheel(folder: Path, kernels: str = "none") -> Path:
    """Without compiled kernels, which take minutes: `tests/packaging/test_wheel.py` has a wheel with some.

    `kernels` names instruction sets to compile for.
    """
    build = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    checked(build, LLMBOX_WHEEL_KERNELS=kernels)
    return next(folder.glob("*.whl"))


def install(wheel: Path, folder: Path, versions: Mapping[str, str]) -> Path:
    """A new environment with the wheel and what it asks for."""
    constraints = folder.with_suffix(".txt")
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    checked([sys.executable, "-P", "-m", "venv", folder])
    checked(
        [folder / "bin/python", "-P", "-m", "pip", "install", "--quiet", "--constraint", constraints, wheel]
    )
    return folder


def all_commands() -> set[str]:
    """Everything that `llmbox` can be told to do, such as `up` and `key add`."""

    def leaves(path: str, command: click.Command) -> Iterator[str]:
        if not isinstance(command, click.Group):
            yield path
            return
        if command.invoke_without_command:
            yield path
        for name, each in command.commands.items():
            yield from leaves(f"{path} {name}", each)

    found: set[str] = set()
    for name, (target, _line) in COMMANDS.items():
        module, _, attribute = target.partition(":")
        found.update(leaves(name, getattr(import_module(module, "llmbox.app.cli"), attribute)))
    return found


@dataclass
class InstalledBox:
    home: Path
    env: Path
    hub_url: str
    called: set[str] = field(default_factory=set)
    """Commands that were run, as `all_commands` names them."""

    def __post_init__(self) -> None:
        for name in ("run", KERNELS):
            (self.home / name).mkdir(mode=0o700, parents=True)
        # Compiled by the suite a while ago, of the same sources; where there are none, `up` compiles.
        for library in Path(os.environ[KERNEL_CACHE]).glob("*.so"):
            shutil.copy2(library, self.home / KERNELS)

    @property
    def environ(self) -> dict[str, str]:
        return {
            **{name: os.environ[name] for name in INHERITED if name in os.environ},
            "PATH": f"{self.env / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "HF_HOME": str(self.home / "hf"),
            "HF_ENDPOINT": self.hub_url,
            "PIP_INDEX_URL": f"{self.hub_url}/simple",
            "LLMBOX_SERVER_PORT": "0",
            "EDITOR": "true",
            "TERM": "dumb",
        }

    def python(self, script: str) -> str:
        done = subprocess.run(
            [self.env / "bin/python", "-P", "-c", script],
            env=self.environ,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(self, *words: object, code: int | None = 0, stdin: str = "") -> Result:
        """A command that must end so (None: either way), without a traceback."""
        command = self._command(words)
        done = subprocess.run(
            command,
            env=self.environ,
            cwd=self.home,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert code in {None, done.returncode}, (
            words,
            done.returncode,
            done.stdout[-2000:],
            done.stderr[-4000:],
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    def json(self, *words: object) -> Any:
        return self.run(*words, "--json").json

    @contextlib.contextmanager
    def running(self, *words: object) -> "Iterator[subprocess.Popen[str]]":
        """A command that goes on. It must have ended by itself when the block ends."""
        with subprocess.Popen(
            self._command(words), env=self.environ, cwd=self.home, stdin=subprocess.DEVNULL, text=True
        ) as child:
            try:
                yield child
                child.wait(PATIENCE)
            finally:
                child.kill()

    def screen(self, *words: object, shows: str) -> str:
        """What a command draws in a terminal until `shows` is there; then it is left with q."""
        ours, theirs = pty.openpty()
        child = subprocess.Popen(
            self._command(words),
            env={**self.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
            cwd=self.home,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        shown = ""
        try:
            shown = _read(ours, lambda text: shows in text)
            os.write(ours, b"q")
            shown += _read(ours, lambda _: child.poll() is not None)
            until(lambda: child.poll() is not None)
        finally:
            child.kill()
            os.close(ours)
        assert shows in shown, shown
        assert child.returncode == 0, shown
        return shown

    def post(self, url: str, body: object, **headers: str) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{url}: {error.code} {error.read().decode()}") from None

    def close(self) -> None:
        """Ends a daemon that a failed test has left."""
        for file in self.home.rglob("*.pid"):
            with contextlib.suppress(ValueError, KeyError, OSError):
                os.kill(json.loads(file.read_text())["pid"], signal.SIGKILL)

    def _command(self, words: Sequence[object]) -> list[str]:
        told = [str(word) for word in words]
        known = all_commands()
        self.called |= {name for length in (1, 2) if (name := " ".join(told[:length])) in known}
        return [str(self.env / "bin/llmbox"), *told]


def _read(terminal: int, enough: Callable[[str], bool]) -> str:
    text = ""
    deadline = time.monotonic() + PATIENCE
    while not enough(text) and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                text += os.read(terminal, 65_536).decode("utf-8", "replace")
            except OSError:  # the other end is closed
                break
    return text
