"""Collects what the sections found and writes it as Markdown."""

import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FAILED = "**FAILED**"
"""What a line about a failure begins with."""


@dataclass
class Report:
    """`total`: seconds for everything. `out`: a file that has each line at once, whatever ends the run.
    `listener`: gets the lines of a piece that runs in a process of its own.
    """

    total: float
    out: Path | None = None
    listener: Callable[[str], None] | None = None
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds."""
        return self._started + self.total - time.monotonic()

    def section(self, title: str) -> None:
        self.say(f"\n## {title}\n")

    def say(self, line: str) -> None:
        self.lines.append(line)
        if self.listener is not None:
            self.listener(line)
            return
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(f"{line}\n")

    def table(self, *header: str) -> None:
        self.row(header)
        self.row(["---"] * len(header))

    def row(self, cells: Sequence[object]) -> None:
        self.say("| " + " | ".join(map(str, cells)) + " |")

    def skipped(self, names: Sequence[str]) -> None:
        if names:
            self.say(f"\nNot measured, out of time: {len(names)} more, {', '.join(names)}.")

    def failed(self, what: str, details: str = "") -> None:
        """`details`: a traceback, for the file."""
        self.failures.append(what)
        self.say("")
        self.say(f"{FAILED}: {what}")
        if details:
            self.say(f"\n```\n{details.rstrip()}\n```\n")


def versions() -> str:
    import torch
    import triton

    command = " ".join(["make gpu-check", *([f'ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else [])])
    gpu = torch.cuda.get_device_properties(0)
    return (
        f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB, {gpu.multi_processor_count} multiprocessors, "
        f"capability {gpu.major}.{gpu.minor}; torch {torch.__version__}, triton {triton.__version__}, "
        f"CUDA {torch.version.cuda}, Python {platform.python_version()}; `{command}`"
    )
