"""What the kernel says of a process or a thread: whether it waits, was stopped, how much it has computed."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessState:
    letter: str
    """R (runs, or waits for a core), S, D (waits for a disk), T (stopped), Z."""
    ticks: int
    """Processor time, in the system's clock ticks (mostly hundredths of a second)."""

    @property
    def seconds(self) -> float:
        """Processor time."""
        return self.ticks / os.sysconf("SC_CLK_TCK")

    @property
    def is_stopped(self) -> bool:
        return self.letter == "T"

    @property
    def waits_for_machine(self) -> bool:
        """For a disk, or for a core that others have: it goes on by itself."""
        return self.letter in {"D", "R"}


def read_state(pid: int) -> ProcessState | None:
    """None for a process that is gone."""
    return _read(Path(f"/proc/{pid}/stat"))


def thread_states(pid: int) -> list[ProcessState]:
    """Of each thread; empty for a process that is gone."""
    try:
        folders = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    return [state for folder in folders if (state := _read(folder / "stat")) is not None]


def _read(path: Path) -> ProcessState | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # its name may have spaces in it
    return ProcessState(fields[0], int(fields[11]) + int(fields[12]))
