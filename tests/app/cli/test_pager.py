"""Long output on a terminal goes through the pager; everything else does not. In a real pseudo-terminal."""

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from llmbox.app.cli import output
output.table(("N",), [(n,) for n in range({rows})])
"""


def shown(rows: int, tmp_path: Path, **environ: str) -> str:
    """What arrives at a terminal of 24 lines."""
    ours, theirs = pty.openpty()
    base = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "PAGER"}}
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT.format(rows=rows)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**base, "TERM": "xterm", "LINES": "24", **environ},
    )
    os.close(theirs)
    data = b""
    while select.select([ours], [], [], 90)[0]:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        data += piece
    child.wait(90)
    os.close(ours)
    return data.decode()


@pytest.mark.parametrize(
    ("rows", "environ", "paged"),
    [
        (100, {}, True),
        (5, {}, False),
        (100, {"TERM": "dumb"}, False),
        (100, {"PAGER": ""}, False),
        (100, {"PAGER": "absent-program"}, False),
        (100, {"PAGER": "'"}, False),
    ],
)
def test_when_the_pager_is_used(tmp_path: Path, rows: int, environ: dict[str, str], paged: bool):
    pager = tmp_path / "my pager"
    pager.write_text("#!/bin/sh\necho PAGED; exec cat\n")
    pager.chmod(0o755)
    text = shown(rows, tmp_path, **{"PAGER": f"'{pager}'", **environ})
    assert ("PAGED" in text) is paged
    assert f"\n{rows - 1}" in text


def test_a_pager_that_leaves_early_is_no_error(tmp_path: Path):
    assert "Traceback" not in shown(50_000, tmp_path, PAGER="head -n 1")
