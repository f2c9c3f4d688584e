"""`make soak`: a real daemon with several models, clients without pause, and a fault a minute.

    python -P -m soak.run [--minutes 10] [--every 60] [--faults N] [--clients 6] [--seed N] [--write]

One line a fault, then a verdict; the exit code is 1 where the pass rule of docs/reliability.md was broken.
The folder with the log stays. `--write` puts the result into that page.
"""

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from llmbox.kernels.cpu.isa import KERNEL_CACHE
from support.results import renew

from .box import BrokenError, SoakBox
from .faults import FAULTS
from .traffic import CutError, Traffic

REQUESTS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every", type=float, default=60, help="seconds from one fault to the next")
    parser.add_argument("--faults", type=int, default=sys.maxsize, help="end after so many")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--write", action="store_true", help="put the result into docs/reliability.md")
    options = parser.parse_args()
    kernels = Path(tempfile.gettempdir()) / f"llmbox-test-kernels-{os.geteuid()}"  # the suite's own
    os.environ.setdefault(KERNEL_CACHE, str(kernels))
    folder = Path(tempfile.mkdtemp(prefix="llmbox-soak-"))
    print(f"seed {options.seed}, data in {folder}", flush=True)
    lines, failure = soak(folder, options)
    verdict = f"BROKEN: {failure}" if failure else "the pass rule held after every fault"
    print(verdict, flush=True)
    if options.write:
        command = f"python -P -m soak.run --minutes {options.minutes:g} --every {options.every:g}"
        command += f" --clients {options.clients} --seed {options.seed}"
        told = [f"{time.strftime('%Y-%m-%d', time.gmtime())}, {platform.machine()}: `{command}`", ""]
        renew("soak", "\n".join([*told, "```text", *lines, verdict, "```"]))
    return 1 if failure else 0


def soak(folder: Path, options: argparse.Namespace) -> tuple[list[str], str]:
    """The lines told, and what broke the rule."""
    box, chance, lines = SoakBox(folder, REQUESTS), random.Random(options.seed), list[str]()
    try:
        box.fill()
        box.up()
        box.remember()
        box.traffic = Traffic(box.url, box.requests, box.expected, options.clients, options.seed)
        _faults(box, chance, options, lines)
    except BrokenError as broken:
        return lines, str(broken)
    finally:
        if box.traffic is not None:
            lines += _sums(box, box.traffic)
            print("\n".join(lines[-3:]), flush=True)
            box.traffic.end()
        box.down()
    return lines, ""


def _sums(box: SoakBox, traffic: Traffic) -> list[str]:
    """Return what all faults together saw, in lines."""
    told = [
        traffic.told,
        Counter({f"answers of {model}": count for model, count in traffic.of_model.items()}),
        box.seen + Counter({"requests of its model that overtook one, at most": traffic.overtaken.most}),
    ]
    return [", ".join(f"{count} {what}" for what, count in sorted(each.items())) for each in told]


def _faults(box: SoakBox, chance: random.Random, options: argparse.Namespace, lines: list[str]) -> None:
    assert box.traffic is not None
    began = time.monotonic()
    number = 0
    while time.monotonic() - began < options.minutes * 60 and number < options.faults:
        fault, word = FAULTS[number % len(FAULTS)]
        log_from, start = box.log_size(), time.monotonic()
        box.traffic.start()
        time.sleep(1)
        try:
            told = fault(box, chance)
            box.check(log_from, word)
        except (BrokenError, CutError) as broken:
            raise BrokenError(f"{fault.__name__}: {broken}") from broken
        lines.append(
            f"{number + 1:3} {fault.__name__:17} held after {time.monotonic() - start:5.1f} s: {told}"
        )
        print(lines[-1], flush=True)
        number += 1
        if number == len(FAULTS) and not box.seen["tokens read from the KV cache on disk"]:
            raise BrokenError("no token was read from the KV cache on disk")
        box.traffic.start()
        time.sleep(max(0.0, start + options.every - time.monotonic()))


if __name__ == "__main__":
    sys.exit(main())
