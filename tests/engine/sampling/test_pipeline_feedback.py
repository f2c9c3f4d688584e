"""Drawn ids of the last stage reach the rows of the first when a step needs them, and never a new owner's."""

from array import array
from queue import Queue

import pytest
import torch

from llmbox.engine.device.device import HostDevice, Uploader
from llmbox.engine.distributed.communicator import TensorParallel
from llmbox.engine.distributed.shm_communicator import PendingReceive
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.sampling.device_state import DeviceRequestState, SampledTokenFeedback


class Way:
    """The last stage is the test."""

    def __init__(self):
        self.drawn = Queue()
        self.waits = 0

    def transfer_to_first_stage(self, x):
        return PendingReceive(lambda: self._arrive(x))

    def _arrive(self, x):
        self.waits += 1
        x.copy_(self.drawn.get_nowait())


class Sent:
    def __init__(self):
        self.given, self.waited = [], []

    def transfer_to_first_stage(self, x):
        self.given.append(x)
        return PendingReceive(lambda: self.waited.append(x))


@pytest.fixture
def way():
    return Way()


@pytest.fixture
def rows():
    return DeviceRequestState(8, 2, 10, 100, torch.device("cpu"))


@pytest.fixture
def first(way, rows):
    return SampledTokenFeedback(TensorParallel(ParallelLayout(1, 2, 0), way), rows, 2)


def expect(hand_back, *numbers):
    hand_back.post_receive(torch.tensor(numbers), numbers)


def test_ids_are_waited_for_when_their_rows_go_on(first, way, rows):
    expect(first, 0, 1)
    expect(first, 2, 3)
    first.wait_for_rows([4, 5])
    assert way.waits == 0
    way.drawn.put(torch.tensor([50, 51]))
    first.wait_for_rows([1, 4])
    assert rows.last_R[:4].tolist() == [50, 51, 0, 0]
    way.drawn.put(torch.tensor([52, 53]))
    first.wait_for_rows([3])
    assert rows.last_R[:4].tolist() == [50, 51, 52, 53]
    assert way.waits == 2


def test_they_come_in_the_order_of_steps(first, way, rows):
    expect(first, 0)
    expect(first, 1)
    way.drawn.put(torch.tensor([50]))
    way.drawn.put(torch.tensor([51]))
    first.wait_for_rows([1])
    assert rows.last_R[:2].tolist() == [50, 51]


def test_what_was_on_its_way_to_a_row_never_reaches_its_next_owner(first, way, rows):
    expect(first, 3)
    way.drawn.put(torch.tensor([50]))
    first.wait_for_rows([3])
    uploader = Uploader(HostDevice(), 2)
    uploader.begin_step()
    rows._last_rows, rows._last = array("q", [3]), array("q", [9])
    rows.flush(uploader)
    for number in range(4, 8):
        expect(first, number)
        way.drawn.put(torch.tensor([60]))
        first.wait_for_rows([number])
    assert rows.last_R[3] == 9


def test_no_more_steps_are_waited_for_than_may_be_launched(first, way):
    for number in range(6):
        expect(first, number)
        way.drawn.put(torch.tensor([number]))
        first.wait_for_rows([])
    assert way.waits == 4


def test_row_numbers_may_change_once_they_are_told(first, way, rows):
    row_S = torch.tensor([0, 1])
    first.post_receive(row_S, [0, 1])
    row_S.fill_(7)
    way.drawn.put(torch.tensor([50, 51]))
    first.wait_for_rows([0])
    assert rows.last_R.tolist() == [50, 51, *[0] * 7]


def test_what_is_sent_stays_until_it_is_there(rows):
    sent = Sent()
    last = SampledTokenFeedback(TensorParallel(ParallelLayout(1, 2, 1), sent), rows, 2)
    ids = [torch.tensor([number]) for number in range(4)]
    for each in ids:
        last.send(each)
    assert [int(each) for each in sent.given] == [0, 1, 2, 3]
    assert [int(each) for each in sent.waited] == [0, 1]
