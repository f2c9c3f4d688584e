"""What a rank other than the first does all day: the steps that rank 0 tells."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .link import Link
from .runner import LocalDevice, LocalRunner
from .step_codec import StepDecoder, decode_graph, encode_result


def serve_steps(link: Link, runner: LocalRunner, *, answers: bool) -> None:
    """In the order told, until rank 0 is gone: raises RankLost. `answers`: this rank's tokens count.

    A thread sends them: rank 0 may be waiting for this stage to take the states of its next step, and reads
    no results until then.
    """
    decoder = StepDecoder()
    with ThreadPoolExecutor(1, "answers") as sender:
        while True:
            result = runner.execute(decoder.decode(link.receive()))
            if answers:
                sender.submit(link.send, encode_result(result).encode())


def serve_launches(link: Link, runner: LocalDevice, *, answers: bool) -> None:
    """As `serve_steps`, ahead of their results: a rank that answers is asked for those, one that does not
    goes no further ahead than rank 0 does.
    """
    decoder = StepDecoder()
    launched: deque[Any] = deque()
    while True:
        frame = link.receive()
        match frame.kind:
            case "step":
                launched.append(runner.launch_sized(decoder.decode(frame), decode_graph(frame)))
                if not answers and len(launched) > runner.depth:
                    launched.popleft().wait()
            case "collect":
                link.send(encode_result(runner.collect(launched.popleft())).encode())
            case "capture":
                runner.capture(frame.body["size"])
            case other:
                raise AssertionError(other)
