"""What the list of models says of one in memory."""

import pytest

from llmbox.ui.tui.models import model_rows
from llmbox.ui.tui.state import State

INFO = {"device": "cuda", "weights_bytes": 10, "kv_bytes": 10, "context_window": 100}


@pytest.mark.parametrize(
    ("cut", "told"), [({"tp": 1, "pp": 1}, "cuda"), ({"tp": 2, "pp": 2}, "cuda x4"), ({}, "cuda")]
)
def test_a_model_on_several_ranks_says_on_how_many(cut, told):
    model = {"name": "m", "state": "ready", "info": {**INFO, **cut}}
    (row,) = model_rows(State(answers={"models": {"models": [model]}}))
    assert row.cells[2][0] == told
