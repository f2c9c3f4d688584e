"""What the list of models says of one in memory."""

import pytest

from llmbox.ui.tui.messages import DashboardState
from llmbox.ui.tui.rendering import UNICODE, line_width
from llmbox.ui.tui.screens.models import about_lines, find_model, model_rows

INFO = {"device": "cuda", "weights_bytes": 10, "kv_bytes": 10, "context_window": 100}


@pytest.mark.parametrize(
    ("cut", "told"), [({"tp": 1, "pp": 1}, "cuda"), ({"tp": 2, "pp": 2}, "cuda x4"), ({}, "cuda")]
)
def test_a_model_on_several_ranks_says_on_how_many(cut, told):
    model = {"name": "m", "state": "ready", "info": {**INFO, **cut}}
    (row,) = model_rows(DashboardState(answers={"models": {"models": [model]}}))
    assert row.cells[2][0] == told


def test_a_model_is_named_with_its_adapters_in_memory():
    model = {"name": "m", "state": "ready", "info": INFO, "adapters": ["pirate", "poet"]}
    (row,) = model_rows(DashboardState(answers={"models": {"models": [model]}}))
    assert (row.key, row.cells[0][0]) == ("m", "m + pirate, poet")


def test_a_failed_download_says_why():
    error = {"code": "repo_not_found", "what": "org/typo was not found", "why": "no such model", "fix": ""}
    failed = {"model": "org/typo", "state": "failed", "done": 0, "total": 0, "error": error}
    state = DashboardState(answers={"downloads": {"downloads": [failed]}})
    (row,) = model_rows(state)
    assert row.cells[1] == ("failed: org/typo was not found", "bad")
    assert find_model(state, "org/typo") == failed


@pytest.mark.parametrize(
    ("phase", "done", "total", "told"),
    [("weights", 40, 100, "loading 40 %"), ("kernels", 1, 3, "compiling 33 %"), ("kernels", 0, 0, "loading")],
)
def test_a_load_says_how_far_it_is(phase, done, total, told):
    progress = {"phase": phase, "done": done, "total": total}
    model = {"name": "m", "state": "loading", "progress": progress}
    (row,) = model_rows(DashboardState(answers={"models": {"models": [model]}}))
    assert row.cells[1][0] == told


def described(state: DashboardState, width: int) -> list[str]:
    (row,) = model_rows(state)
    lines = about_lines(row, find_model(state, row.key), width, UNICODE)
    assert all(line_width(line) <= width for line in lines)
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def test_a_download_that_failed_is_described_whole_with_what_to_do():
    why = "its license must be accepted on the page of the model"
    error = {"code": "gated", "what": "org/m is gated", "why": why, "fix": "open the page and accept it"}
    failed = {"model": "org/m", "state": "failed", "done": 0, "total": 0, "error": error}
    name, *rest = described(DashboardState(answers={"downloads": {"downloads": [failed]}}), 40)
    assert name.startswith(" org/m ─")
    assert (
        " ".join(line.strip() for line in rest) == f"org/m is gated: {why} To do: open the page and accept it"
    )


def test_a_model_is_described_with_what_a_narrow_list_leaves_out():
    model = {"name": "m", "state": "ready", "info": INFO, "pinned": True, "expires_s": 240}
    told = " ".join(described(DashboardState(answers={"models": {"models": [model]}}), 60))
    for fact in ("device     cuda", "context    100", "pinned     yes", "unloads in 4 min"):
        assert fact in told
