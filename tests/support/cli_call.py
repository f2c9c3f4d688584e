"""Commands run in this process, with an environment and, where needed, a daemon of their own making."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.cli.root import run
from llmbox.app.lifecycle.program import Program


@dataclass
class FakeClient:
    """A daemon that answers from a table."""

    answers: dict[str, Any] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        return self.answers[path]

    def is_up(self) -> bool:
        return True


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Call = Callable[..., Done]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def call(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    def run_command(*arguments: object, client: FakeClient | None = None, **environ: str) -> Done:
        program = Program(environ={"HOME": str(home), "HF_HOME": str(tmp_path / "hf"), **environ})
        if client is not None:
            program.client = client  # type: ignore[assignment]
        code = run(["--data-dir", str(tmp_path / "data"), *map(str, arguments)], program)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return Done(code, shown.out, shown.err)

    return run_command
