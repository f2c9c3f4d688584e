"""`make simulate`: the whole daemon in virtual time, a thousand accidents a minute.

    python -P -m simulate.run [--seeds 1000] [--first 0] [--minutes M] [--weather storm] [--seed N] [--write]

A seed draws models, clients and faults, and the same seed gives the same run bit for bit. The run ends at
the first broken rule of docs/reliability.md, unless `--keep-going`, and prints the command that repeats it.
`--seed N` runs one seed and prints its trace. `--write` puts the result into that page.
"""

import argparse
import gc
import platform
import sys
import time
from collections import Counter

from support.results import renew

from .scenario import WEATHERS, draw_scenario
from .simulation import SimulationReport, simulate
from .world import World

_EVERY = 1000
"""Seeds between two lines of progress."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="run this one and print its trace")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so long; 0: after all seeds")
    parser.add_argument("--weather", choices=WEATHERS, help="kind of all runs, instead of a drawn one")
    parser.add_argument("--keep-going", action="store_true", help="go on after a broken rule")
    parser.add_argument("--write", action="store_true", help="put the result into docs/reliability.md")
    options = parser.parse_args()
    if options.seed is not None:
        return run_one(options.seed, options.weather)
    lines, broken = run_many(options)
    if options.write:
        command = f"python -P -m simulate.run --first {options.first} --seeds {options.seeds}"
        command += f" --minutes {options.minutes:g}" if options.minutes else ""
        head = f"{time.strftime('%Y-%m-%d', time.gmtime())}, {platform.machine()}, one process: `{command}`"
        renew("simulate", "\n".join([head, "", "```text", *lines, "```"]))
    return 1 if broken else 0


def run_one(seed: int, weather: str | None) -> int:
    scenario = draw_scenario(seed, weather)  # type: ignore[arg-type]
    print(scenario)
    note = World.note

    def show(world: World, text: str) -> None:
        print(f"{world.loop.time():14.6f} {text}")
        note(world, text)

    World.note = show  # type: ignore[method-assign]
    report = simulate(seed, scenario)
    print(f"digest {report.digest}")
    print(report.broken or "the pass rule held")
    return 1 if report.broken else 0


def run_many(options: argparse.Namespace) -> tuple[list[str], int]:
    """Run all seeds. Returns the lines that sum them up, and the number of broken runs."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # runs are short: most garbage goes by its counts
    began, used = time.monotonic(), time.process_time()
    reports = Counter[str]()
    outcomes, weathers = Counter[str](), Counter[str]()
    virtual, seeds = 0.0, 0
    for seed in range(options.first, options.first + options.seeds):
        scenario = draw_scenario(seed, options.weather)
        report = simulate(seed, scenario)
        seeds += 1
        virtual += report.virtual_s
        weathers[report.weather] += 1
        reports["requests"] += report.requests
        reports["deaths"] += report.deaths
        outcomes.update(report.outcomes)
        if report.broken:
            reports["broken"] += 1
            _tell(report, options.weather)
            if not options.keep_going:
                break
        wall = time.monotonic() - began
        if seeds % _EVERY == 0:
            print(f"{seeds} seeds in {wall:.0f} s", flush=True)
        if options.minutes and wall > options.minutes * 60:
            break
    wall, used = time.monotonic() - began, time.process_time() - used
    lines = [
        f"{seeds} seeds ({_counted(weathers)})",
        f"{reports['requests']} requests: {_counted(outcomes)}",
        f"{reports['deaths']} engines died; {virtual:.3g} virtual seconds",
        f"{wall:.0f} s, {used:.0f} s of a processor",
        f"each second of a processor: {seeds / used:.0f} seeds, {virtual / used:.0f} virtual seconds",
        f"{reports['broken']} broken" if reports["broken"] else "the pass rule held in all",
    ]
    print("\n".join(lines), flush=True)
    return lines, reports["broken"]


def _tell(report: SimulationReport, weather: str | None) -> None:
    more = f" --weather {weather}" if weather else ""
    print(f"seed {report.seed} ({report.weather}): {report.broken}")
    print(f'  again: make simulate ARGS="--seed {report.seed}{more}"', flush=True)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
