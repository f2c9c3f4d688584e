"""Work in a process of its own that tells how far it is: one JSON object a line to stdout.

What the work tells, such as {"progress": [done, total]}, or {"compiling": [steps done, steps]} where the CPU
kernels are not there yet; then {"report": …} or {"error": {"code",
"message"}}.
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

Tell = Callable[[dict[str, Any]], None]


def told(work: "Callable[[Tell], DataclassInstance]") -> int:
    """Exit status of the process whose work this is."""
    compile_progress.set(lambda done, total: tell({"compiling": [done, total]}))
    try:
        report = work(tell)
    except (EngineError, OSError, ValueError) as error:
        tell({"error": {"code": getattr(error, "code", "failed"), "message": str(error)}})
        return 1
    tell({"report": asdict(report)})
    return 0


def tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
