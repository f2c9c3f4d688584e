"""Limits of the code's size and shape (`make metrics`); a number beyond its aim is held at today's value."""

import gc
import importlib.util
import sys
from pathlib import Path

import pytest

PACKAGING = Path(__file__).parents[2] / "packaging"


def load(name):
    spec = importlib.util.spec_from_file_location(name, PACKAGING / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


metrics = load("code_metrics")
request_flow = load("request_flow")


@pytest.fixture(scope="module", autouse=True)
def _without_collections():
    """The trees of all modules stay: each collection would go through them."""
    gc.disable()
    yield
    gc.enable()


FLAT = 15

MODULE_LINES = 400

MODULES_TODAY = 504
DUPLICATED_TODAY = 12
FLOW_FILES_TODAY = 100


def test_no_folder_but_a_dialect_has_many_files_flat():
    over = {
        folder: number
        for folder, number in metrics.flat_files().items()
        if number > FLAT and folder not in metrics.DIALECTS
    }
    assert not over, "group what belongs together in a folder"


def test_the_number_of_modules_does_not_grow():
    assert metrics.num_modules() <= MODULES_TODAY, "put it into a module that is there, or merge two"


def test_no_module_is_long():
    over = {name: lines for name, lines in metrics.line_counts().items() if lines > MODULE_LINES}
    assert not over, "split it where its ideas part"


def test_a_class_name_occurs_once():
    assert metrics.repeated_class_names() == {}


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert metrics.banned_beginnings() == []


@pytest.mark.slow
def test_repetitions_do_not_grow():
    assert metrics.duplicated_lines() <= DUPLICATED_TODAY, "share a function, or repeat less"


def test_readme_is_short():
    assert metrics.readme_lines() <= 120
    assert metrics.widest_readme_cell() <= 12


def test_glossary_is_short():
    assert metrics.glossary_lines() <= 40


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import os\n# why\nx = 1  # one\n", ["x = 1"]),
        (
            'def f(\n    a: int,\n) -> int:\n    """Text."""\n    return (\n        a\n    )\n',
            ["return (", "a"],
        ),
    ],
)
def test_lines_of_code_have_no_imports_signatures_comments_or_docstrings(tmp_path, source, lines):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert metrics.code_lines(path) == lines


@pytest.mark.process
def test_a_streamed_chat_passes_no_more_files():
    flow = request_flow.measure_flow()
    assert 20 < flow.files <= FLOW_FILES_TODAY
    assert 0 < flow.functions_in <= flow.calls_in
    assert flow.calls_back > 0
    assert flow.calls_step > 0


def test_flow_is_counted_from_the_calls_of_each_process():
    daemon = [
        ("a.py", "receive"),
        ("a.py", "EngineClient.send"),
        *[("b.py", "TokenStream.push"), ("c.py", "f")] * 3,
    ]
    engine = [("e.py", "Engine.step"), ("e.py", "g"), ("e.py", "h")] * 2
    spare = [("w.py", "load"), ("e.py", "Engine.step")]
    flow = request_flow.summarize([[], spare, engine, daemon])
    assert flow == request_flow.Flow(
        files=4,
        rooms={"b.py": 1, "c.py": 1, "a.py": 1, "e.py": 1},
        calls_in=1,
        functions_in=1,
        calls_back=2,
        calls_step=3,
    )
