"""What the kernel says of a process: whether it was stopped, and how much it has computed."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessState:
    letter: str
    """R (runs, or waits for a core), S, D (waits for a disk), T (stopped), Z."""
    ticks: int
    """Processor time, in hundredths of a second."""

    @property
    def is_stopped(self) -> bool:
        return self.letter == "T"

    @property
    def waits_for_machine(self) -> bool:
        """For a disk, or for a core that others have: it goes on by itself."""
        return self.letter in {"D", "R"}


def read_state(pid: int) -> ProcessState | None:
    """None for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # its name may have spaces in it
    return ProcessState(fields[0], int(fields[11]) + int(fields[12]))
