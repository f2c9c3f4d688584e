"""Durations as Ollama's clients write them."""

import math

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.http.ollama.calls import seconds_of


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (None, None),
        (0, 0),
        ("0", 0),
        ("0s", 0),
        (300, 300),
        (0.5, 0.5),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h1m1.5s", 3661.5),
        ("250ms", 0.25),
        (" +2h ", 7200),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
    ],
)
def test_what_is_said_in_seconds(said: float | str | None, seconds: float | None) -> None:
    assert seconds_of(said) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("said", ["", "soon", "5 m", "5x", "m", "--1m", "1e9", "nan", "9" * 400, "1m-1s"])
def test_what_is_no_duration(said: str) -> None:
    with pytest.raises(ApiError) as refused:
        seconds_of(said)
    assert (refused.value.status, refused.value.param) == (400, "keep_alive")
