"""Which objects of a schema are closed: all that name their properties, none that others have a say in."""

import jsonschema_rs
import pytest

from llmbox.app.text.grammar.grammars import close_objects

AGE = {"properties": {"age": {"type": "integer"}}}
NAME = {"properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "object", **AGE}, [{"age": 1}, {}], [{"age": 1, "x": 2}]),
        ({"type": "object"}, [{"x": 1}], []),
        ({**AGE, "required": ["age", "x"]}, [{"age": 1, "x": 2}], []),
        ({**AGE, "additionalProperties": True}, [{"x": 1}], []),
        ({**AGE, "additionalProperties": NAME}, [{"x": {"name": "a"}}], [{"x": {"name": "a", "b": 1}}]),
        ({**AGE, "patternProperties": {"^x": NAME}}, [{"x": {}}], [{"x": {"y": 1}}]),
        ({"items": AGE}, [[{"age": 1}]], [[{"x": 1}]]),
        ({"prefixItems": [AGE]}, [[{"age": 1}]], [[{"x": 1}]]),
        (
            {"properties": {"of": {"$ref": "#/$defs/age"}}, "$defs": {"age": AGE}},
            [{"of": {}}],
            [{"of": {"x": 1}}],
        ),
        ({"anyOf": [AGE, NAME]}, [{"age": 1}, {"name": "a"}], [{"x": 1}, {"age": 1, "name": 1}]),
        ({"allOf": [AGE, NAME]}, [{"age": 1, "name": "a"}], []),
        ({"allOf": [{"$ref": "#/$defs/age"}, NAME], "$defs": {"age": AGE}}, [{"age": 1, "name": "a"}], []),
        ({"allOf": [{"$ref": "#/$defs/age"}], "$defs": {"age": AGE}}, [{"age": 1}], [{"x": 1}]),
        ({**AGE, "anyOf": [NAME, {"required": ["age"]}]}, [{"age": 1, "name": "a"}], []),
        ({**AGE, "$ref": "#/$defs/name", "$defs": {"name": NAME}}, [{"age": 1, "name": "a"}], []),
        ({**AGE, "if": NAME, "then": NAME}, [{"age": 1, "name": "a"}], []),
        ({"properties": {"properties": {"type": "string"}}}, [{"properties": "a"}], [{"x": 1}]),
        (
            {"properties": {"next": {"$ref": "#"}}, "required": []},
            [{"next": {"next": {}}}],
            [{"next": {"x": 1}}],
        ),
        ({"enum": [{"properties": {}}]}, [{"properties": {}}], [{}]),
    ],
)
def test_what_is_taken_then(schema, taken, refused):
    validator = jsonschema_rs.validator_for(close_objects(schema))
    assert [each for each in taken if not validator.is_valid(each)] == []
    assert [each for each in refused if validator.is_valid(each)] == []


def test_shapes_that_no_schema_has_are_passed_on():
    odd = {"properties": [], "allOf": 3, "items": True, "$defs": {"a": 1}, "anyOf": [None]}
    assert close_objects(odd) == odd
