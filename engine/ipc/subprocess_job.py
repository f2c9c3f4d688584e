"""Job in a subprocess that reports its progress: one JSON object per line on standard output.

First come reports of the job, such as {"progress": [done, total]}, or {"compiling": [steps done, steps]}
while the CPU kernels are compiled. The last line is {"report": …} or {"error": {"code", "message"}}.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmbox.kernels.cpu.build import compile_progress

from ..errors import EngineError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ReportProgress = Callable[[dict[str, Any]], None]


def run_job(work: "Callable[[ReportProgress], DataclassInstance]") -> int:
    """Run `work`, write its report or error, and return the exit status of the process."""
    compile_progress.set(lambda done, total: report({"compiling": [done, total]}))
    try:
        result = work(report)
    except (EngineError, OSError, ValueError) as error:
        report({"error": {"code": getattr(error, "code", "failed"), "message": str(error)}})
        return 1
    report({"report": asdict(result)})
    return 0


def report(message: dict[str, Any]) -> None:
    """Write one message as a line of JSON, and flush it."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
