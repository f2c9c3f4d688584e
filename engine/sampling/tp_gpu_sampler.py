"""Asynchronous sampler for tensor parallelism on GPUs, without synchronizing with the device.

It corresponds to `tp_sampler.py` for CPU ranks, but no result may be read to choose the next operation: rows
are split into strategies by their parameters alone, and each strategy determines its ids for certain.

S sampling rows, G of them with one strategy, M of those that this rank owns, V this rank's vocabulary shard,
K candidates, t ranks, C columns of `DeviceSamplerOutput`.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from llmbox.kernels.sampling_types import SampleRows

from ..core.request import Request
from ..device.upload import move
from ..distributed.communicator import TensorParallel, rows_of_rank
from ..sampling_params import SamplingParams
from .draw import SampledRows, SamplingTensors, draw_among
from .draw_async import GREEDY_BELOW, from_keys, keys, largest, sampling_tensors
from .gpu_sampler import DeviceSampler, DeviceSamplerOutput, logprobs_request
from .sampler import is_plain
from .tp_draw import TPDraw

_FEWEST_CANDIDATES = 16
_MOST_CANDIDATES = 4096
"""Candidates of all ranks together that the sampling kernel takes."""
_ID_BITS = 32


class DeviceSamplingStrategy(Enum):
    """Sampling method of a row."""

    GREEDY = 0
    WHOLE = 1
    """From the sums of weights of each shard."""
    RANKED = 2
    """From the candidates of each rank, as many as top-k keeps."""
    DEALT = 3
    """From whole rows, each gathered on one rank, which samples it and shares the result: rows with penalties
    or log-probabilities, and with top-p but without top-k, which may keep any number of ids."""


class Draws(Protocol):
    """Sampler interface of the GPU runner."""

    def draw(
        self, logits_SV: Tensor, requests: list[Request], row_S: Tensor, position_S: Tensor
    ) -> DeviceSamplerOutput: ...


def device_sampler(rank: TensorParallel, whole: DeviceSampler, vocab_size: int) -> Draws:
    """Return the sampler of this rank. `whole`: sampler of whole rows."""
    if not rank.layout.is_last:
        whole.rows.rules = None  # this rank does not sample
    if rank.layout.tp == 1 or not rank.layout.is_last:
        return whole
    return TPDeviceSampler(rank, whole, vocab_size)


class TPDeviceSampler:
    """`DeviceSampler` for logits [S, V of this rank]: all ranks sample together and get the same ids."""

    def __init__(self, rank: TensorParallel, whole: DeviceSampler, vocab_size: int) -> None:
        self._rank = rank
        self._whole = whole
        self._vocab_size = vocab_size
        self._part = rank.layout.vocabulary(vocab_size)
        self._held = self._part.stop - self._part.start
        smallest = vocab_size - (rank.layout.tp - 1) * self._part.size
        # Candidates of half a shard or more cost as much as gathering the rows.
        self._most_candidates = smallest // 2
        if whole.has_kernel:
            self._most_candidates = min(self._most_candidates, _MOST_CANDIDATES // rank.layout.tp)

    def draw(
        self, logits_SV: Tensor, requests: list[Request], row_S: Tensor, position_S: Tensor
    ) -> DeviceSamplerOutput:
        """Sample, and store the tokens in the request state."""
        ways = [self._way(request.params) for request in requests]
        if len(set(ways)) == 1:
            return self._draw(ways[0], logits_SV, requests, row_S, position_S)
        parts: list[tuple[Tensor, DeviceSamplerOutput]] = []
        for way in sorted(set(ways), key=lambda way: way.value):
            places = [place for place, each in enumerate(ways) if each == way]
            place_G = move(torch.tensor(places), logits_SV.device)
            chosen = [requests[place] for place in places]
            drawing = self._draw(way, logits_SV[place_G], chosen, row_S[place_G], position_S[place_G])
            parts.append((place_G, drawing))
        return _merge(requests, parts)

    def _draw(
        self,
        way: DeviceSamplingStrategy,
        logits_GV: Tensor,
        requests: list[Request],
        row_G: Tensor,
        position_G: Tensor,
    ) -> DeviceSamplerOutput:
        if way == DeviceSamplingStrategy.DEALT:
            return self._draw_whole_rows(logits_GV, requests, row_G, position_G)
        drawn = self._draw_sharded(way, logits_GV[:, : self._held], requests, row_G, position_G)
        self._whole.rows.store_sampled(row_G, drawn.id)
        columns = [drawn.id.double(), drawn.best.double(), drawn.best.double()]
        return DeviceSamplerOutput(torch.stack(columns, 1), drawn.id, requests, logprobs=False, top=0)

    def _draw_sharded(
        self,
        way: DeviceSamplingStrategy,
        logits_GV: Tensor,
        requests: list[Request],
        row_G: Tensor,
        position_G: Tensor,
    ) -> SampledRows:
        shared = TPDraw(self._rank.collective, self._part)
        if way == DeviceSamplingStrategy.GREEDY:
            return shared.greedy(logits_GV)
        rows = self._whole.rows.sampling(row_G, position_G)
        size = self._candidates(max(each.params.top_k for each in requests))
        if self._whole.parts is not None:
            return self._by_kernel(shared, way, logits_GV, rows, size)
        knobs = sampling_tensors(self._vocab_size, rows)
        return (
            shared.whole(logits_GV.float(), knobs)
            if way == DeviceSamplingStrategy.WHOLE
            else self._ranked(logits_GV, knobs, size)
        )

    def _by_kernel(
        self, shared: TPDraw, way: DeviceSamplingStrategy, logits_GV: Tensor, rows: SampleRows, size: int
    ) -> SampledRows:
        parts = self._whole.parts
        assert parts is not None
        if way == DeviceSamplingStrategy.WHOLE:
            best_G = shared.best(logits_GV)
            return shared.by_weights(parts.weigh(logits_GV, best_G, rows), best_G, parts.noise(rows))
        # Shards are in the order of ids, so columns of equal logits are too.
        mine_GK = parts.candidates(logits_GV, rows, size, self._part.start)
        all_GK = self._rank.collective.gather(mine_GK).transpose(0, 1).flatten(1)
        value_GK = (all_GK >> _ID_BITS).to(torch.int32).view(torch.float32)
        sampled = self._whole.sample(value_GK, rows)
        id_G = all_GK.gather(1, sampled.ids[:, None])[:, 0] & ((1 << _ID_BITS) - 1)
        return SampledRows(id_G, sampled.best, torch.ones_like(id_G, dtype=torch.bool))

    def _draw_whole_rows(
        self, logits_GV: Tensor, requests: list[Request], row_G: Tensor, position_G: Tensor
    ) -> DeviceSamplerOutput:
        layout = self._rank.layout
        wanted, mine = (
            logprobs_request(requests, self._vocab_size),
            rows_of_rank(len(requests), layout.tp, layout.tp_rank),
        )
        whole_MV = self._rank.collective.all_to_all_rows(logits_GV).transpose(0, 1).flatten(1)
        self._whole.count(requests, row_G, position_G)
        size = rows_of_rank(len(requests), layout.tp, 0).stop
        padded = torch.zeros(size, wanted.columns, dtype=torch.float64, device=logits_GV.device)
        if len(whole_MV):
            _, numbers_MC = self._whole.numbers(
                whole_MV, requests[mine], row_G[mine], position_G[mine], wanted
            )
            padded[: len(numbers_MC)] = numbers_MC
        numbers_GC = self._rank.collective.gather(padded).flatten(0, 1)[: len(requests)]
        ids_G = numbers_GC[:, 0].long()
        self._whole.rows.store_sampled(row_G, ids_G)
        return DeviceSamplerOutput(numbers_GC, ids_G, requests, wanted.logprobs, wanted.top)

    def _ranked(self, logits_GV: Tensor, knobs: SamplingTensors, size: int) -> SampledRows:
        """Sample from the best ids of all ranks, by sort keys without ties."""
        mine_GK = largest(keys(logits_GV, self._part.start), size)
        all_GK = self._rank.collective.gather(mine_GK).transpose(0, 1).flatten(1)
        value_GK, id_GK = from_keys(largest(all_GK, size))
        certain_G = torch.full((len(id_GK),), size, device=id_GK.device)
        return draw_among(value_GK, id_GK, certain_G, knobs, None)

    def _way(self, params: SamplingParams) -> DeviceSamplingStrategy:
        if not is_plain(params):
            return DeviceSamplingStrategy.DEALT
        if params.temperature < GREEDY_BELOW:
            return DeviceSamplingStrategy.GREEDY
        if 0 < params.top_k < self._vocab_size:
            return (
                DeviceSamplingStrategy.RANKED
                if self._candidates(params.top_k) <= self._most_candidates
                else DeviceSamplingStrategy.DEALT
            )
        return DeviceSamplingStrategy.WHOLE if params.top_p >= 1.0 else DeviceSamplingStrategy.DEALT

    @staticmethod
    def _candidates(top_k: int) -> int:
        return max(_FEWEST_CANDIDATES, 1 << (top_k - 1).bit_length())


def _merge(
    requests: list[Request], parts: Sequence[tuple[Tensor, DeviceSamplerOutput]]
) -> DeviceSamplerOutput:
    """Merge the outputs of several strategies; at most one of them has log-probabilities."""
    most = max((drawing for _, drawing in parts), key=lambda drawing: drawing.numbers_SC.shape[1])
    ids_S = most.ids_S.new_empty(len(requests))
    numbers_SC = most.numbers_SC.new_zeros(len(requests), most.numbers_SC.shape[1])
    for place_G, drawing in parts:
        ids_S.index_copy_(0, place_G, drawing.ids_S)
        numbers_SC[:, : drawing.numbers_SC.shape[1]].index_copy_(0, place_G, drawing.numbers_SC)
    return DeviceSamplerOutput(numbers_SC, ids_S, requests, most.logprobs, most.top)
