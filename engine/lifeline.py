"""How a process of the engine hangs on the one that started it, and where it logs."""

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

# Of two processes of ours the kernel should take the engine: the daemon can start it again.
_OOM_SCORE_ADJ: Final = "500"
_PR_SET_PDEATHSIG: Final = 1

log = logging.getLogger("llmbox.engine")


def bind_to_parent(parent: int) -> None:
    """Killed when the parent's thread that started us ends. Raises SystemExit if it is gone already."""
    os.umask(0o077)
    # Ctrl-C and systemd's SIGTERM reach the whole group; the daemon drains and tells us when to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE_ADJ, encoding="ascii")
        except OSError as error:
            log.debug("oom_score_adj stays as it is: %s", error)
    if os.getppid() != parent:  # it died before prctl could watch it
        raise SystemExit(0)


def log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
