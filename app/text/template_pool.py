"""Chat templates, rendered in processes of their own (`template_worker.py`)."""

import json
from typing import Any

from ..errors import ApiError
from .worker_pool import WorkerPool


def job(template: str, variables: dict[str, Any]) -> bytes:
    return json.dumps({"template": template, "variables": variables}).encode()


class TemplatePool(WorkerPool):
    def __init__(self, size: int = 2) -> None:
        super().__init__("template_worker", size)

    async def render(self, job: bytes) -> str:
        """The text of a `job`. Raises ApiError 400 where the template refuses, fails or takes too much."""
        reply = await self.answer(job)
        if "error" in reply:
            raise _refused(reply["error"])
        return reply["text"]


def _refused(reason: str) -> ApiError:
    return ApiError(
        400,
        f"The model's chat template refused these messages: {reason}",
        code="chat_template_error",
        param="messages",
    )
