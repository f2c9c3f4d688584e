"""JSON schemas whose objects have no keys but their own, as peers read a schema that does not say.

By the letter an object may have any further key, and small models then fill in keys until their tokens end.
"""

from collections.abc import Iterator
from typing import Any, Final

_SAYS: Final = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_JOINS: Final = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
"""An object is what these say together: none of them may forbid what another one asks for."""
_MAPS: Final = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES: Final = ("items", "contains", "additionalProperties", "if", "then", "else", "not")


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy with `additionalProperties: false` where an object names its properties and leaves that open."""
    shared = {ref for ref in _joined_references(schema, joined=False) if ref != "#"}
    closed: dict[str, Any] = _closed(schema, "#", shared, joined=False)
    return closed


def _closed(schema: Any, at: str, shared: set[str], *, joined: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        place, parts = f"{at}/{name}", joined or _joins(schema)
        if name in _MAPS and isinstance(value, dict):
            made[name] = {
                key: _closed(each, f"{place}/{key}", shared, joined=name == "dependentSchemas")
                for key, each in value.items()
            }
        elif name in _LISTS and isinstance(value, list):
            beside = parts and name != "prefixItems"
            made[name] = [
                _closed(each, f"{place}/{n}", shared, joined=beside) for n, each in enumerate(value)
            ]
        elif name in _ONES:
            made[name] = _closed(value, place, shared, joined=name in {"if", "then", "else", "not"})
        else:
            made[name] = value
    alone = not joined and at not in shared and not any(name in schema for name in (*_JOINS, *_SAYS))
    if alone and _names_all_keys(schema):
        made["additionalProperties"] = False
    return made


def _names_all_keys(schema: dict[str, Any]) -> bool:
    """Closed without one of its `required` keys, an object could not be written at all."""
    named, required = schema.get("properties"), schema.get("required", [])
    return isinstance(named, dict) and isinstance(required, list) and all(key in named for key in required)


def _joins(schema: dict[str, Any]) -> bool:
    """Its parts describe one object together with others."""
    several = len(schema.get("allOf") or ()) if isinstance(schema.get("allOf"), list) else 0
    kinds = sum(name in schema for name in (*_JOINS, "properties"))
    return several > 1 or kinds > 1


def _joined_references(schema: Any, *, joined: bool) -> Iterator[str]:
    """Places that are referred to beside something else."""
    if isinstance(schema, list):
        for each in schema:
            yield from _joined_references(each, joined=joined)
    if not isinstance(schema, dict):
        return
    parts = joined or _joins(schema)
    if parts and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            for each in value.values():
                yield from _joined_references(each, joined=False)
        elif name in _LISTS:
            yield from _joined_references(value, joined=parts and name != "prefixItems")
        elif name in _ONES:
            yield from _joined_references(value, joined=False)
