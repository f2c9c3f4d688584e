"""Engines that outlived their daemon. They should not exist (they die with it): if one does, it is named."""

import logging
import os

log = logging.getLogger("llmbox.daemon")

TITLE = "llmbox: engine"


def name_leftovers() -> list[int]:
    """Pids of engine processes of this user whose parent is no daemon; also written to the log."""
    import psutil  # noqa: PLC0415 - 30 ms that the start need not wait for

    found = []
    for process in psutil.process_iter(["pid", "uids", "cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        uids = process.info["uids"]
        if not line.startswith(TITLE) or uids is None or uids.real != os.getuid():
            continue
        try:
            parent = process.parent()
            if parent is None or parent.pid == 1:
                found.append(process.info["pid"])
        except psutil.Error:
            continue
    if found:
        pids = " ".join(map(str, found))
        log.warning("engine processes of an earlier daemon still run: %s; end them with: kill %s", pids, pids)
    return found
