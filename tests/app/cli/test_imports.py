"""`llmbox --help` and `ps` stay quick: they import none of the large libraries. Looked at from outside."""

import subprocess
import sys
from pathlib import Path

import pytest

from llmbox.__main__ import main
from llmbox.app.cli.root import INTERRUPTED

LARGE = {
    "torch", "numpy", "tokenizers", "huggingface_hub", "litestar", "uvicorn", "httpx", "textual",
    "sqlalchemy", "sqlmodel", "pydantic", "jinja2", "prometheus_client", "msgspec", "psutil",
}  # fmt: skip

SCRIPT = """
import sys
from llmbox.app.cli.root import run
from llmbox.app.lifecycle.program import Program
run(sys.argv[1:], Program())
print("MODULES", *{name.partition(".")[0] for name in sys.modules})
"""


def imported(script: str, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split("MODULES", 1)[1].split())


@pytest.mark.parametrize("command", ["--help", "ps", "status", "version", "up --help", "top --help"])
def test_the_command_line_imports_nothing_large(tmp_path: Path, command: str):
    assert not imported(SCRIPT, "--data-dir", str(tmp_path), *command.split()) & LARGE


def test_the_daemon_imports_no_torch():
    modules = imported("import sys, llmbox.app.daemon.serve\nprint('MODULES', *sys.modules)")
    assert "litestar" in modules
    assert not modules & {
        "torch",
        "numpy",
        "safetensors",
        "transformers",
        "huggingface_hub",
        "textual",
        "httpx",
    }


class Interrupts:
    """Finder during whose search Ctrl-C arrives."""

    def find_spec(self, *_: object) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_during_imports_ends_the_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "llmbox.app.cli.root", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupts()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == INTERRUPTED
