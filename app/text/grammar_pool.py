"""Grammars, checked in a process of their own (`grammar_worker.py`)."""

import json
from typing import Any

from ..errors import ApiError
from .worker_pool import WorkerPool


class GrammarPool(WorkerPool):
    def __init__(self, size: int = 1) -> None:
        super().__init__("grammar_worker", size)

    async def compiled(self, grammars: list[dict[str, Any]], param: str) -> str:
        """For `SamplingParams.grammar`. Raises ApiError 400 with `param` for what nothing can follow, or
        what takes too much.
        """
        reply = await self.answer(json.dumps({"grammars": grammars}).encode())
        if "error" in reply:
            why = " ".join(reply["error"].split())
            raise ApiError(
                400, f"No answer can be made to follow '{param}': {why}", code="invalid_grammar", param=param
            )
        return reply["grammar"]
