"""One open request: its parameters, the tokens received so far, and the queue to its single reader."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace
from types import TracebackType
from typing import Self

from llmbox.engine.ipc.messages import AddRequest, RequestOutput


class TokenStream:
    """Async iterator over the outputs of one request; the one with `finish_reason` is the last.

    Every stream ends: with `stop` or `length`, with `abort` after `cancel`, else with `error` and an
    `error_code`. Use it as a context manager: leaving the block cancels a running request.
    """

    def __init__(self, request: AddRequest, cancel: Callable[["TokenStream"], None]) -> None:
        self.request = request
        self.output_ids: list[int] = list(request.output_ids)
        """Every token received from an engine, read or not. A resumed engine continues after them."""
        self.resumes = 0
        """Number of engine deaths that interrupted this request after it had been sent."""
        self.finished = False
        self._cancel = cancel
        self._outputs: deque[RequestOutput] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._first_seen = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self.finished:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self._outputs.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the request. The engine gets the abort at once and frees the blocks before its next step.
        Idempotent.
        """
        if not self.finished:
            self._cancel(self)

    # ------------------------------------------------------------------ the supervisor's side

    def push(self, output: RequestOutput) -> None:
        """Queue an output. No output is accepted after the last one."""
        assert not self.finished
        if self._first_seen:
            if output.scheduled_at is not None or output.prompt_logprobs is not None:
                # A resumed engine sends the first output's facts again; the reader has them.
                output = replace(
                    output,
                    scheduled_at=None,
                    cached_tokens=None,
                    looked_up_tokens=None,
                    prefix_end=None,
                    prompt_logprobs=None,
                )
        elif output.token_ids:
            self._first_seen = True
        self.output_ids += output.token_ids
        self.finished = output.finish_reason is not None
        self._outputs.append(output)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def fail(self, code: str, message: str) -> None:
        self.push(
            RequestOutput(
                request_id=self.request.request_id,
                finish_reason="error",
                error_code=code,
                error_message=message,
            )
        )

    def message(self, in_engine: Collection[str]) -> AddRequest:
        """Message to send to an engine that already has the requests `in_engine`."""
        request = self.request
        params = request.params
        if self._first_seen and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)
        return replace(
            request,
            params=params,
            output_ids=list(self.output_ids),
            fork_of=request.fork_of if request.fork_of in in_engine else None,
        )
