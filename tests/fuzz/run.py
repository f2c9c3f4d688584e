"""`make fuzz`: inputs nobody thought of, for every parser, as long as told.

    python -P -m fuzz.run [--seconds 300] [--inputs N] [--only NAME] [--seed N] [--write]

The time is shared out evenly. With `--inputs` each parser ends after so many, and those after it get the time
that it leaves. One line a parser; a failure prints the smallest input that shows it and its seed, and the
exit code is 1. `--write` puts the result into docs/reliability.md.
"""

import argparse
import random
import sys
import time
import traceback

from hypothesis import HealthCheck, Phase, given, seed, settings

from support.results import renew

from .targets import TARGETS, Target

BATCH = 200
"""Inputs of one seed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--inputs", type=int, default=sys.maxsize, help="most of each parser")
    parser.add_argument("--only", choices=sorted(TARGETS))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--write", action="store_true", help="put the result into docs/reliability.md")
    options = parser.parse_args()
    names = [options.only] if options.only else list(TARGETS)
    until = time.monotonic() + options.seconds
    lines = []
    for place, name in enumerate(names):
        share = (until - time.monotonic()) / (len(names) - place)
        lines.append(fuzz(name, share, options.inputs, options.seed))
    if options.write:
        bound = "" if options.inputs == sys.maxsize else f" --inputs {options.inputs}"
        command = f"python -P -m fuzz.run --seconds {options.seconds:g}{bound} --seed {options.seed}"
        told = f"{time.strftime('%Y-%m-%d', time.gmtime())}: `{command}`"
        renew("fuzz", "\n".join([told, "", "```text", *lines, "```"]))
    return 1 if any("FAILED" in line for line in lines) else 0


def fuzz(name: str, seconds: float, most: int, first_seed: int) -> str:
    """Try batches of inputs until the time is over, there were enough, or one fails. Return its line."""
    began, count = time.monotonic(), 0
    for number in range(first_seed, sys.maxsize):
        found, tried = _batch(TARGETS[name], number)
        count += tried
        if found or count >= most or time.monotonic() - began > seconds:
            break
    spent = time.monotonic() - began
    verdict = f"FAILED with seed {number}: {found}" if found else "nothing found"
    line = f"{name:12} {count:8} inputs in {spent:5.0f} s: {verdict}"
    print(line, flush=True)
    return line


def _batch(target: Target, number: int) -> tuple[str, int]:
    """The failure in one line, or nothing; and how many inputs were tried."""
    tried = 0

    @seed(number)
    @settings(
        max_examples=BATCH, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(target.inputs)
    def check(value: object) -> None:
        nonlocal tried
        tried += 1
        target.check(value)

    try:
        check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever a parser raises; a panic is no Exception
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:200], tried
    return "", tried


if __name__ == "__main__":
    sys.exit(main())
