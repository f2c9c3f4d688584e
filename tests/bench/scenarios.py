"""`make bench`: every scenario of `llmbox bench` on a fresh daemon, tables into docs/notes/scenarios.md.

    python -P tests/bench/scenarios.py [--model builtin] [--scale full] [--rounds 5] [--part NAME] [--dry]

Starts a daemon of its own in a temporary folder on a free port; whatever else runs on this box disturbs the
figures, which is why they are ratios of interleaved rounds with their range.
"""

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTES = ROOT / "docs/notes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--scale", default="full")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", default="scenarios_builtin", help="which part of the notes to renew")
    parser.add_argument("--ids", default="300:1500")
    parser.add_argument("--dry", action="store_true", help="print the tables, leave the notes alone")
    options = parser.parse_args()
    results = measure(options)
    table = heading(options) + "\n".join(map(section, results))
    if options.dry:
        print(table)
    else:
        renew(options.part, table)


def measure(options: argparse.Namespace) -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="llmbox-bench-") as folder:
        where = ["--data-dir", folder]
        llmbox("up", "--port", "0", "--no-wait", "builtin", *where)
        try:
            llmbox("unload", "--all", *where)
            told = llmbox(
                "bench", options.model, "--scenario", "all", "--scale", options.scale, "--ids", options.ids,
                "--rounds", str(options.rounds), "--json", *where,
            )  # fmt: skip
        finally:
            llmbox("down", "--now", *where)
    return json.loads(told)["scenarios"]


def llmbox(*words: str) -> str:
    command = [sys.executable, "-P", "-m", "llmbox", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def heading(options: argparse.Namespace) -> str:
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    machine = f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores"
    command = f"python -P tests/bench/scenarios.py --model {Path(options.model).name} --scale {options.scale}"
    return (
        f"\n{machine}; llmbox {version('llmbox')}, torch {version('torch')}; "
        f"{dt.datetime.now(dt.UTC).date()}; {options.rounds} interleaved rounds; `{command}`\n\n"
    )


def section(result: dict) -> str:
    first, second = result["variants"]
    lines = [
        f"**{result['scenario']}**\n",
        f"| figure | {first} | {second} | {second} / {first}, median (range) |",
        "| --- | --- | --- | --- |",
    ]
    for name, (a, b, ratio) in result["figures"].items():
        spread = f"{ratio['median']:.3g} ({ratio['low']:.3g}..{ratio['high']:.3g})"
        lines.append(f"| {name} | {a:.4g} | {b:.4g} | {spread} |")
    return "\n".join(lines) + "\n"


def renew(part: str, table: str) -> None:
    """Write a table between the marks of its part, in the note that has them."""
    begin, end = f"<!-- measured {part} -->\n", "<!-- end measured -->"
    (page,) = [page for page in NOTES.glob("*.md") if begin in page.read_text("utf-8")]
    before, _, rest = page.read_text("utf-8").partition(begin)
    page.write_text(before + begin + table + end + rest.partition(end)[2], "utf-8")


if __name__ == "__main__":
    main()
