"""Thoughts and tool calls in answers: formats of model families, and the parsers of streams."""

from .call_parsers import Schemas
from .harmony_parser import HarmonyParser
from .output_formats import OutputFormat, Thinking
from .output_parser import MarkParser, OutputParser


def make_parser(
    format_: OutputFormat,
    thinking: Thinking,
    schemas: Schemas | None = None,
    most_calls: int | None = None,
    *,
    is_forced: bool = False,
) -> OutputParser:
    """Return the parser of one answer. The arguments are those of `OutputParser`."""
    kind = HarmonyParser if format_.is_harmony else MarkParser
    return kind(format_, thinking, schemas, most_calls, is_forced=is_forced)
