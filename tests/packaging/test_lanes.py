"""Which tests `make test-fast` takes, and what `make nightly` adds."""

from itertools import combinations, product

import pytest

from support.lanes import (
    NIGHTLY,
    OUTSIDE,
    TESTS,
    ProcessGuard,
    every_pair,
    examples,
    heavy_import,
    why_not_fast,
)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import subprocess", "starts processes"),
        ("def f():\n    from multiprocessing import Pool", "starts processes"),
        ("from support.cli_box import box", "starts processes"),
        ("from support import openai_server", "starts processes"),
        ("from support.real_engines import load", "runs whole engines"),
        ("from llmbox.kernels.triton.elementwise import norm_rows", "runs Triton's interpreter"),
        ("import json\nfrom support.clock import Clock", ""),
    ],
)
def test_imports_say_what_is_left_out(tmp_path, text, why):
    file = tmp_path / "test_it.py"
    file.write_text(text)
    assert heavy_import(file) == why


def test_the_fast_lane_has_the_units_and_no_other_lane():
    found = {str(file.relative_to(TESTS)) for file in TESTS.rglob("test_*.py") if not why_not_fast(file)}
    assert {"app/http/server/test_sse.py", "engine/core/test_scheduler.py"} <= found
    assert {name for name in found if name.startswith(OUTSIDE)} == set()
    assert len(found) > 100


def test_a_fast_test_that_starts_a_process_fails():
    guard = ProcessGuard()
    guard("subprocess.Popen", ("ls",))
    guard.armed = True
    guard("open", ("file",))
    with pytest.raises(RuntimeError, match=r"starts a process"):
        guard("subprocess.Popen", ("ls",))


def test_the_suite_draws_a_quarter_of_the_examples_of_a_night():
    assert [examples(count) for count in (400, 20)] == ([400, 20] if NIGHTLY else [100, 10])


def test_by_day_any_two_values_meet_and_each_night_all():
    axes = ("ab", "cdef", "ghi", "jk")
    params = every_pair(*axes)
    assert [tuple(param.values) for param in params] == list(product(*axes))
    by_day = [param.values for param in params if not param.marks]
    pairs = {pair for values in by_day for pair in combinations(values, 2)}
    assert pairs == {pair for one, other in combinations(axes, 2) for pair in product(one, other)}
    assert len(by_day) == 12
