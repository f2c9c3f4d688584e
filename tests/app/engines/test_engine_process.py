import logging

import pytest

from llmbox.app.engines.engine_process import parse_log_level

STAMP = "2026-11-22 07:29:40,838"


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (f"{STAMP} WARNING llmbox.kernels.dispatch: the fast CPU kernels are off", logging.WARNING),
        (f"{STAMP} ERROR llmbox.engine: a step failed", logging.ERROR),
        (f"{STAMP} INFO llmbox.engine: loaded", logging.INFO),
        ("Traceback (most recent call last):", logging.INFO),
        ("a WARNING somewhere", logging.INFO),
        ("", logging.INFO),
    ],
)
def test_a_line_of_an_engine_keeps_its_level(line: str, level: int) -> None:
    assert parse_log_level(line) == level
