import pytest

from llmbox.engine.checkpoint.files import MAX_DEPTH, parse_json, read_json
from llmbox.engine.errors import ModelError


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + "1" + closing * depth


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 990, 4000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_an_error_and_no_crash(tmp_path, depth, opening, closing):
    with pytest.raises(ValueError, match="deeper than 64 levels"):
        parse_json(nested(depth, opening, closing))
    (tmp_path / "config.json").write_text('{"x": ' + nested(depth, opening, closing) + "}")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON .*deeper than 64"):
        read_json(tmp_path / "config.json")


def test_what_is_nested_within_the_bound_is_read():
    value = parse_json(nested(MAX_DEPTH))
    for _ in range(MAX_DEPTH):
        (value,) = value
    assert value == 1


def test_the_hook_sees_every_object():
    assert parse_json('{"a": {"b": 1}}', dict) == {"a": {"b": 1}}
