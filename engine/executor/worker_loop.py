"""Worker loop: receive steps from rank 0 and execute this rank's shard of them."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..core.executor_interface import ModelRunner
from ..distributed.socket_link import Link
from ..errors import RankLost
from ..runner.gpu_runner import GPUModelRunner
from .step_codec import StepDecoder, decode_graph, encode_result


def serve_steps(link: Link, runner: ModelRunner, *, answers: bool) -> None:
    """Execute steps in order of arrival until rank 0 is gone, which raises RankLost.

    `answers`: this rank sends results. A thread sends them: rank 0 may be blocked until this stage receives
    the hidden states of its next step, and reads no results until then.
    """
    decoder = StepDecoder()
    with ThreadPoolExecutor(1, "answers") as sender:
        while True:
            result = runner.execute(decoder.decode(link.receive()))
            if answers:
                sender.submit(link.send, encode_result(result).encode())


def serve_launches(link: Link, runner: GPUModelRunner, *, answers: bool) -> None:
    """Launch steps ahead of their results, no further than rank 0 does, until rank 0 is gone (RankLost)."""
    follow = _Answering(link, runner) if answers else _Following(runner)
    decoder = StepDecoder()
    try:
        while True:
            frame = link.receive()
            match frame.kind:
                case "step":
                    follow.add(runner.launch_sized(decoder.decode(frame), decode_graph(frame)))
                case "capture":
                    runner.capture(frame.body["size"])
                case other:
                    raise AssertionError(other)
    except RankLost:
        follow.end()
        raise


class _Following:
    """Bookkeeping of a rank that sends no results: waits for older launches."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._depth = runner.depth
        self._launched: deque[Any] = deque()

    def add(self, handle: Any) -> None:
        self._launched.append(handle)
        if len(self._launched) > self._depth:
            self._launched.popleft().wait()

    def end(self) -> None:
        return


class _Answering:
    """Bookkeeping of the rank that sends results: a thread sends each as soon as the device has it, whatever
    is launched meanwhile. Rank 0 sends no step before it has the results of older ones.
    """

    def __init__(self, link: Link, runner: GPUModelRunner) -> None:
        self._link = link
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "answers")
        self._failed: Future[None] | None = None

    def add(self, handle: Any) -> None:
        self._thread.submit(self._send, handle).add_done_callback(self._done)

    def end(self) -> None:
        """Raise the error with which a result failed, if one did."""
        self._thread.shutdown(cancel_futures=True)
        if self._failed is not None:
            self._failed.result()

    def _send(self, handle: Any) -> None:
        self._link.send(encode_result(self._runner.collect(handle)).encode())

    def _done(self, sent: "Future[None]") -> None:
        if not sent.cancelled() and sent.exception() is not None:
            self._failed = self._failed or sent
            self._link.end()  # rank 0 waits for this result, and the thread that serves for rank 0
