"""What rank 0 and its workers settle among them."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmbox.engine.distributed.socket_link import Link
from llmbox.engine.executor.workers import Worker, WorkerGroup, all_min_on_worker
from llmbox.engine.model_config.parallel_layout import ParallelLayout


@pytest.mark.parametrize("numbers", [(5, 9, 7), (9, 5, 7), (9, 7, 5)])
def test_all_ranks_take_the_least_of_their_numbers(numbers):
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM) for _ in numbers[1:]]
    crew = WorkerGroup(ParallelLayout(3))
    crew.processes = [Worker(rank, None, Link(ours)) for rank, (ours, _) in enumerate(pairs, 1)]
    with ThreadPoolExecutor(2) as pool:
        others = pool.map(all_min_on_worker, [Link(theirs) for _, theirs in pairs], numbers[1:])
        assert crew.all_min(numbers[0]) == 5
        assert list(others) == [5, 5]
    for pair in pairs:
        for end in pair:
            end.close()
