"""Entry point of a worker process (any rank but 0): `python -P -m llmbox.engine.process.worker_main`.

`executor/workers.py` starts it, or forks the engine process to run `main`. It loads its shard, joins the
process group, and executes the steps that rank 0 sends over the inherited socket. It ends with rank 0: at the
end of the stream while it reads there, otherwise killed by the kernel.
"""

import argparse
import logging
import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from setproctitle import setproctitle

from ..light_torch import import_torch_or_restart

if __name__ == "__main__":
    import_torch_or_restart()  # before the modules below import all of it

from ..config import EngineConfig
from ..core.step import ModelRunner
from ..distributed.communicator import TensorParallel
from ..distributed.shm_communicator import PeerSockets
from ..distributed.step_codec import Frame, Link, StepDecoder, decode_graph, encode_result
from ..errors import DoesNotFit, EngineError, RankLost
from ..executor.expert_moves import ExpertMover
from ..executor.kv_tiers import WorkerBlocks
from ..executor.multiproc import connect
from ..executor.rank_engine import RankEngine, load_rank
from ..executor.workers import all_min_on_worker
from ..hardware.proc import bind_to_parent, exit_process, log_to_stderr
from ..planning.estimator import MemoryPlan
from ..runner.cpu_runner import CPUModelRunner
from ..runner.cuda_graphs import GraphSize
from ..runner.gpu_runner import GPUModelRunner


def serve_steps(
    link: Link,
    runner: ModelRunner,
    *,
    answers: bool,
    blocks: WorkerBlocks | None = None,
    mover: ExpertMover | None = None,
) -> None:
    """Execute steps in order of arrival until rank 0 is gone, which raises RankLost.

    Between them `blocks` copies KV blocks, and `mover` has experts change places. `answers`: this rank sends
    results. A thread sends them: rank 0 may be blocked until this stage receives the hidden states of its
    next step, and reads no results until then.
    """
    decoder = StepDecoder()
    with ThreadPoolExecutor(1, "answers") as sender:
        while True:
            frame = link.receive()
            if blocks is not None and frame.kind in {"block_sizes", "copy_blocks"}:
                blocks.execute(frame)
                continue
            if mover is not None and frame.kind == "move_experts":
                mover.execute(frame.body)
                continue
            result = runner.execute(decoder.decode(frame))
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
                    runner.capture(GraphSize(**frame.body))
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


_EXIT_LOAD_FAILED: Final = 3
_EXIT_CRASHED: Final = 70  # EX_SOFTWARE
_LAST_WORDS_SECONDS: Final = 5.0

log = logging.getLogger("llmbox.engine")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="llmbox worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to rank 0")
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    options = parser.parse_args(argv)
    log_to_stderr()
    bind_to_parent(options.parent)
    os.set_inheritable(options.fd, False)
    try:
        return _run(Link(socket.socket(fileno=options.fd)))
    except RankLost:
        return 0
    except Exception:
        log.exception("this rank stops after an error")
        return _EXIT_CRASHED


def _run(link: Link) -> int:
    frame = link.receive()
    assert frame.kind == "load"
    config, plan = EngineConfig(**frame.body["config"]), MemoryPlan(**frame.body["plan"])
    layout = plan.layout(frame.body["rank"])
    setproctitle(f"llmbox: worker {config.name} rank {layout.rank}")
    rank = TensorParallel(layout)
    try:
        share = load_rank(config, plan, rank, lambda _done, _total: None)
    except EngineError as error:
        _refuse(link, error.code, str(error))
        return _EXIT_LOAD_FAILED
    except Exception as error:
        _refuse(link, RankLost.code, f"{type(error).__name__}: {error}")
        raise
    link.send(Frame("loaded", {"measured": share.measured, "backend": share.backend}).encode())
    ends = PeerSockets(
        frame.body["ends"]["memory"], {int(r): fd for r, fd in frame.body["ends"]["peers"].items()}
    )
    where = link.receive().body
    try:
        rank.join(connect(layout, config, plan, ends, where["over"], Path(where["file"])))
    except EngineError as error:
        log.error("%s", error)  # noqa: TRY400 - the message says it all
        _refuse(link, error.code, str(error))
        # Rank 0 fails likewise or receives this error and reports it, unless this process ends before it can.
        select.select([link], [], [], _LAST_WORDS_SECONDS)
        return _EXIT_LOAD_FAILED
    link.send(Frame("joined").encode())
    _serve(link, share, tuple(frame.body["blocks"]), answers=layout.rank == layout.answers)
    return 0


def _refuse(link: Link, code: str, message: str) -> None:
    link.send(Frame("refused", {"code": code, "message": message}).encode())


def _serve(link: Link, share: RankEngine, blocks: tuple[int, int], *, answers: bool) -> None:
    """Execute steps until rank 0 is gone, which raises RankLost. `blocks`: see `WorkerBlocks`."""
    try:
        local, _ = share.finish(lambda blocks: all_min_on_worker(link, blocks))
    except DoesNotFit:
        link.receive()  # all ranks agreed on the size, so rank 0 fails too: it reports that and ends
        raise
    if isinstance(local, GPUModelRunner):
        serve_launches(link, local, answers=answers)
    else:
        parts, mover = None, None
        if isinstance(local, CPUModelRunner):
            parts = WorkerBlocks(link, local.block_memory(), *blocks)
            mover = ExpertMover(local)
        serve_steps(link, local, answers=answers, blocks=parts, mover=mover)


if __name__ == "__main__":
    exit_process(main())
