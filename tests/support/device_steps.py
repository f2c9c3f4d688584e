"""Rows of requests that draw step by step on a device, as its runner does it."""

import copy

import torch

from llmbox.engine.core.step import ScheduledRequest
from llmbox.engine.device.device import Uploader
from llmbox.engine.distributed.communicator import SINGLE
from llmbox.engine.sampling.device_sampler import DeviceSampler
from llmbox.engine.sampling.device_state import DeviceRequestState


class Steps:
    """`late`: the host knows a step's tokens after the next one. `rank`: has a part of each row."""

    def __init__(self, ops, vocab_size, requests, device, late, rank=SINGLE):
        self.where = device.torch_device
        self.rows = DeviceRequestState(len(requests) + 1, 1, 0, vocab_size, self.where)
        self.sampler = DeviceSampler(ops, self.rows, vocab_size, rank)
        self.uploader = Uploader(device, 3)
        self.requests = requests
        self.known = copy.deepcopy(requests)
        """What one has who knows all tokens."""
        self.late = late

    def note(self):
        """Rows and positions."""
        self.uploader.begin_step()
        planned = [
            ScheduledRequest(one, 0, known.num_tokens, True, one.admissions)
            for one, known in zip(self.requests, self.known, strict=True)
        ]
        numbers = [self.rows.stage_update(one) for one in planned]
        self.rows.flush(self.uploader)
        positions = [known.num_tokens for known in self.known]
        return torch.tensor(numbers, device=self.where), torch.tensor(positions, device=self.where)

    def draw(self, logits_SV):
        row_S, position_S = self.note()
        drawing = self.sampler.draw(logits_SV, self.requests, row_S, position_S)
        found = drawing.read(drawing.numbers_SC.tolist())
        for one, known, pick in zip(self.requests, self.known, found, strict=True):
            drawn = 7 if isinstance(pick, str) else pick.token_id
            one.token_ids[:] = known.token_ids if self.late else [*known.token_ids, drawn]
            one.num_pending = 2 if self.late else 1
            known.token_ids.append(drawn)
        return found


def alike(found, wanted):
    """But for the last bits of log-probabilities."""
    if isinstance(wanted, str) or wanted.logprobs is None:
        return found == wanted
    one, other = found.logprobs, wanted.logprobs
    numbers = [one.logprob, *(p for _, p in one.top)], [other.logprob, *(p for _, p in other.top)]
    return (
        (found.token_id, one.rank) == (wanted.token_id, other.rank)
        and [i for i, _ in one.top] == [i for i, _ in other.top]
        and all(abs(a - b) < 1e-5 for a, b in zip(*numbers, strict=True))
    )
