"""A few inputs for every parser in each run of the tests; `make fuzz` gives them hours."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.targets import TARGETS, Target, check_calls, check_grammar, check_settings


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_it_is_read_or_refused(target: Target, data: st.DataObject) -> None:
    target.check(data.draw(target.inputs))


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "[server]\nport = " + "9" * 4400, "[server]\nport = 0000-00-00"]
)
def test_settings_that_python_cannot_hold_are_refused(text: str) -> None:
    check_settings(text)


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "call", ['{"name": "f", "arguments": {"a": %s}}', '{"name": "f", "arguments": "{\\"a\\": [%s]}"}']
)
def test_calls_are_json_that_can_be_sent(call: str, value: str) -> None:
    check_calls(call % (value.replace("\\", "\\\\").replace('"', '\\"') if "\\" in call else value))


def test_a_name_that_cannot_be_sent_is_no_call() -> None:
    check_calls('{"name": "\\ud800", "arguments": {}}')


def test_calls_that_python_warns_of_print_nothing(recwarn: pytest.WarningsRecorder) -> None:
    check_calls("[f(a=1if 2 else 3)]")
    assert list(recwarn) == []


@pytest.mark.parametrize("field", ["pattern", "maxLength", "$ref"])
def test_schemas_over_which_the_library_panics_are_refused(field: str) -> None:
    """It cuts what it complains of at a number of bytes, in the middle of a letter."""
    check_grammar({"json_schema": {field: ["x" + "\u00e9" * 70]}})
