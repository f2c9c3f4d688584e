"""From logits to tokens without waiting for the device: what was drawn stays there, a copy goes to the host.

S rows that sample, V vocabulary, N alternatives asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops
from llmbox.kernels.rows import Sampled

from ..messages import TokenLogprobs
from ..request import Request
from ..sampler.ranking import best_of
from ..sampler.rules import RequestRules, RuleBook, apply_rules
from ..sampler.sampler import problem_of
from ..sampler.weights import log_total
from ..sampling import SamplingParams
from ..step import SampledToken
from ..step_batch import move
from .draw import GREEDY_BELOW, Needs, facts, likeliest, plain_sample
from .rows import Rows

FEWEST_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class Drawing:
    """`numbers_SC`, float64 on the device: id, largest logit before and after the rules; with `logprobs`
    also logit, sum of weights and rank of the id; then N ids and their N logits.
    """

    numbers_SC: Tensor
    ids_S: Tensor
    requests: list[Request]
    logprobs: bool
    top: int

    def read(self, rows: Sequence[Sequence[float]]) -> tuple[dict[str, SampledToken], dict[str, str]]:
        """Tokens and problems by request, from `numbers_SC` on the host."""
        tokens: dict[str, SampledToken] = {}
        failed: dict[str, str] = {}
        for request, row in zip(self.requests, rows, strict=True):
            problem = problem_of(row[1], row[2])
            if problem is not None:
                failed[request.request_id] = problem
            else:
                tokens[request.request_id] = SampledToken(int(row[0]), self._logprobs(request.params, row))
        return tokens, failed

    def _logprobs(self, params: SamplingParams, row: Sequence[float]) -> TokenLogprobs | None:
        if params.logprobs is None:
            return None
        token, best = int(row[0]), row[1]
        logit, total, rank = row[3:6]
        norm = log_total(best, int(total))
        ids, logits = row[6 : 6 + params.logprobs], row[6 + self.top : 6 + self.top + params.logprobs]
        top = [(int(i), value - norm) for i, value in zip(ids, logits, strict=True)]
        return TokenLogprobs(token_id=token, logprob=logit - norm, rank=int(rank), top=top)


class DeviceSampler:
    def __init__(self, ops: Ops, rows: Rows, vocab_size: int) -> None:
        self._ops = ops
        self.rows = rows
        self._vocab_size = vocab_size
        self._rules = RuleBook(vocab_size)

    @property
    def has_kernel(self) -> bool:
        """Whether the backend draws whole rows in an operation of its own."""
        return self._ops.sample is not None

    def draw(self, logits_SV: Tensor, requests: list[Request], row_S: Tensor, position_S: Tensor) -> Drawing:
        """Also leaves the tokens in the rows. Columns of the logits beyond the vocabulary are padding."""
        raw_SV = logits_SV[:, : self._vocab_size]
        edited_SV = self._edited(raw_SV, requests, row_S)
        wanted = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        ids_S, best_S, sampled = self._choose(edited_SV, requests, row_S, position_S)
        self.rows.keep_drawn(row_S, ids_S)
        edited = edited_SV is not raw_SV
        columns = [ids_S, best_of(raw_SV)[0] if edited else best_S, best_S]
        top = min(max(wanted, default=0), self._vocab_size)
        if wanted:
            told = facts(raw_SV, ids_S) if edited or sampled is None else sampled
            columns += [told.logit, told.total, told.rank]
        if top:
            value_SN, id_SN = likeliest(raw_SV, top)
            columns += [*id_SN.unbind(1), *value_SN.unbind(1)]
        numbers_SC = torch.stack([column.double() for column in columns], 1)
        return Drawing(numbers_SC, ids_S, requests, bool(wanted), top)

    def _choose(
        self, logits_SV: Tensor, requests: Sequence[Request], row_S: Tensor, position_S: Tensor
    ) -> tuple[Tensor, Tensor, Sampled | None]:
        """Ids, each row's largest logit, and all that the backend's own operation found."""
        if self._ops.sample is not None:
            sampled = self._ops.sample(logits_SV, self.rows.sampling(row_S, position_S))
            return sampled.ids, sampled.best, sampled
        needs = needs_of([request.params for request in requests], self._vocab_size)
        if not (needs.whole or needs.candidates):
            best_S, ids_S = best_of(logits_SV)
            return ids_S, best_S, None
        drawn = plain_sample(logits_SV, self.rows.sampling(row_S, position_S), needs)
        return drawn.id, drawn.best, None

    def _edited(self, logits_SV: Tensor, requests: Sequence[Request], row_S: Tensor) -> Tensor:
        """The same tensor where no rule says anything; a float32 copy otherwise."""
        active = self._rules.active(requests)
        if not active:
            return logits_SV
        places = [row for row, request in enumerate(requests) if request.request_id in active]
        rules: list[RequestRules] = [active[requests[row].request_id] for row in places]
        place_E = move(torch.tensor(places), logits_SV.device)
        last_E = self.rows.last_R[row_S[place_E]]
        edited_SV = logits_SV.to(torch.float32, copy=True)
        part_EV = edited_SV.index_select(0, place_E)
        apply_rules(part_EV, rules, last_E)
        return edited_SV.index_copy_(0, place_E, part_EV)


def needs_of(params: Sequence[SamplingParams], vocab_size: int) -> Needs:
    """All likelier ids than top-p cuts must be ranked, which is all, where no top-k bounds them."""
    greedy = whole = False
    candidates = 0
    for one in params:
        cuts_k = 0 < one.top_k < vocab_size
        if one.temperature < GREEDY_BELOW:
            greedy = True
        elif cuts_k:
            candidates = max(candidates, one.top_k, FEWEST_CANDIDATES)
        elif one.top_p < 1.0:
            candidates = vocab_size
        else:
            whole = True
    return Needs(greedy, whole, min(candidates, vocab_size))
