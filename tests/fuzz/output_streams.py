"""`make fuzz-streams`: random answers in every output format, which say the same however they are cut.

    python -P -m fuzz.output_streams [--streams 1000000] [--seconds N] [--only NAME] [--seed N] [--write]

Each stream is a text with marks of its format in any order. It is parsed whole, in random pieces, and
character by character. One line a format; a text that differs ends it, and then the exit code is 1.
`--seconds` bounds the whole lane: the lines tell how many streams there were. `--write` puts them into
docs/reliability.md.
"""

import argparse
import itertools
import random
import sys
import time

from llmbox.app.text.output import make_parser
from llmbox.app.text.output.call_parsers import Schemas
from llmbox.app.text.output.output_formats import OutputFormat, ReasoningMarks, Thinking
from llmbox.app.text.output.output_parser import ParsedOutput
from support.output_examples import FORMATS, SCHEMAS, random_answer
from support.results import renew

BATCH = 1000
"""Streams between two looks at the clock."""


def parse(
    pieces: list[str] | str, thinking: Thinking, format_: OutputFormat, schemas: Schemas
) -> ParsedOutput:
    parser = make_parser(format_, thinking, schemas)
    whole = ParsedOutput()
    for part in [*map(parser.push, pieces), parser.finish()]:
        whole.add(part)
    return whole


def differing_stream(name: str, source: random.Random, count: int) -> str:
    """Return the first of `count` random texts that is read otherwise in pieces; empty: there is none."""
    marks = ReasoningMarks("<think>", "</think>", anywhere=source.random() < 0.5)
    for _ in range(count):
        format_ = FORMATS[name]
        if not format_.is_harmony:
            format_ = OutputFormat(
                name=name,
                tools=format_.tools,
                wrapper=format_.wrapper,
                reasoning=source.choice([None, marks]),
            )
        thinking = "no" if format_.reasoning is None else source.choice(["no", "may", "inside"])
        text = random_answer(name, source)
        cuts = sorted({0, len(text), *(source.randrange(len(text) + 1) for _ in range(6))})
        pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
        schemas = source.choice([SCHEMAS, {}])
        whole = parse([text], thinking, format_, schemas)
        if any(parse(each, thinking, format_, schemas) != whole for each in (pieces, text)):
            return text or "(empty)"
    return ""


def fuzz(name: str, streams: int, seconds: float, seed: str) -> str:
    """Return the line of one format."""
    began, count, found = time.monotonic(), 0, ""
    while count < streams and not found and time.monotonic() - began < seconds:
        batch = min(BATCH, streams - count)
        found = differing_stream(name, random.Random(f"{name} {seed} {count}"), batch)
        count += batch
    verdict = f"FAILED: {found!r}" if found else "nothing found"
    line = f"{name:14} {count:8} streams in {time.monotonic() - began:5.0f} s: {verdict}"
    print(line, flush=True)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10**6, help="of each format")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of all formats together")
    parser.add_argument("--only", choices=sorted(FORMATS))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--write", action="store_true", help="put the result into docs/reliability.md")
    options = parser.parse_args()
    names = [options.only] if options.only else list(FORMATS)
    share = options.seconds / len(names)
    lines = [fuzz(name, options.streams, share, str(options.seed)) for name in names]
    if options.write:
        bound = "" if options.seconds == float("inf") else f" --seconds {options.seconds:g}"
        command = f"python -P -m fuzz.output_streams --streams {options.streams}{bound} --seed {options.seed}"
        told = f"{time.strftime('%Y-%m-%d', time.gmtime())}: `{command}`"
        renew("streams", "\n".join([told, "", "```text", *lines, "```"]))
    return 1 if any("FAILED" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
