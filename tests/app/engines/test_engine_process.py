import logging

import pytest

from llmbox.app.engines.engine_process import parse_log_line

STAMP = "2026-11-22 07:29:40,838"


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        (
            f"{STAMP} WARNING llmbox.kernels.dispatch: the fast CPU kernels are off",
            logging.WARNING,
            "the fast CPU kernels are off",
        ),
        (f"{STAMP} ERROR llmbox.engine: a step failed: no", logging.ERROR, "a step failed: no"),
        (f"{STAMP} INFO llmbox.engine: loaded", logging.INFO, "loaded"),
        (f"{STAMP} INFO torch: a note", logging.INFO, "torch: a note"),
        ("Traceback (most recent call last):", logging.INFO, "Traceback (most recent call last):"),
        ("a WARNING somewhere", logging.INFO, "a WARNING somewhere"),
        ("", logging.INFO, ""),
    ],
)
def test_a_line_of_an_engine_keeps_its_level_and_loses_its_time(line: str, level: int, message: str) -> None:
    assert parse_log_line(line) == (level, message)
