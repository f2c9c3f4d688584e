"""Template worker: renders chat templates in a separate process, `python -P -m
llmbox.app.sandbox.template_worker`.

Jinja's sandbox keeps a template from Python's insides, but not from `'a' * 10**9` or an endless loop, so the
process lives under limits and the daemon may kill it at any moment (`worker.py`).

job:    {"template": str, "variables": {...}}
answer: {"text": str} or {"error": str}
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .worker import run_worker

MEMORY_BYTES = 256 << 20
OUTPUT_CHARS = 8 << 20


class _Generation(Extension):
    """`{% generation %}` tag. It marks the assistant's text for training; here its body is simply
    rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Namespace that refuses names with a leading underscore, which would reach Python's own attributes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the local date


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` filter without jinja's HTML escapes: models were trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that transformers gives to chat templates."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    env.globals["namespace"] = _Namespace
    return env


ENV = _environment()
compiled = lru_cache(maxsize=16)(ENV.from_string)


def render(template: str, variables: dict[str, Any]) -> str:
    parts: list[str] = []
    size = 0
    for part in compiled(template).generate(**variables):
        size += len(part)
        if size > OUTPUT_CHARS:
            raise jinja2.TemplateError(f"it wrote more than {OUTPUT_CHARS} characters")
        parts.append(part)
    return "".join(parts)


def answer(message: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render(message["template"], message["variables"])}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MB of memory"}
    except RecursionError:
        return {"error": "it nests too deeply"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {error.message}"[:500]}
    except Exception as error:  # noqa: BLE001 - whatever a template does wrong is an answer, not a crash
        return {"error": (str(error) or type(error).__name__)[:500]}


if __name__ == "__main__":
    run_worker("template worker", lambda: answer, MEMORY_BYTES)
