"""What a request's parameters change in its logits before anything is chosen, in vLLM's order:

logit bias, then repetition, frequency and presence penalties, then what is forbidden (bad words, stop ids
before `min_tokens`, everything outside `allowed_token_ids`). Forbidding has the last word: if it leaves
nothing, the row has no token and fails.

Only touched ids are read and written. Legend: R rows, V vocabulary, N touched entries of all rows together.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..request import Request
from ..sampling import SamplingParams
from .counts import TokenCounts

_LARGEST = torch.finfo(torch.float32).max
FORBIDDEN = float("-inf")


def penalises(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


class RequestRules:
    """The rules of one request, kept between steps so that a step costs only what is new.

    Ids outside the vocabulary are dropped: an end-of-sequence id that the model cannot produce is no error.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.params
        self.request = request
        self.counts = TokenCounts(request) if penalises(params) else None
        bias = {i: value for i, value in params.logit_bias.items() if 0 <= i < vocab_size}
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self.bias_values = torch.tensor(list(bias.values()), dtype=torch.float32)
        self.allowed: Tensor | None = None
        if params.allowed_token_ids is not None:
            self.allowed = torch.tensor(_inside(set(params.allowed_token_ids), vocab_size), dtype=torch.int64)
        self._stop_ids = _inside(params.stop_token_ids, vocab_size)
        self._bad_words = [word for word in params.bad_words if word and 0 <= word[-1] < vocab_size]

    def refresh(self) -> bool:
        """Take in the tokens since the last call; returns whether logits change in this step."""
        if self.counts is not None:
            self.counts.catch_up(self.request)
        penalised = self.counts is not None and len(self.counts) > 0
        fixed = self.allowed is not None or len(self.bias_ids) > 0
        return penalised or fixed or bool(self._bad_words) or self._too_short()

    def forbidden(self) -> list[int]:
        """Ids that must not come next. Bad words are matched over prompt and output, as transformers does."""
        tokens = self.request.token_ids
        ids = [word[-1] for word in self._bad_words if _ends_with(tokens, word[:-1])]
        return ids + self._stop_ids if self._too_short() else ids

    def _too_short(self) -> bool:
        return bool(self._stop_ids) and self.request.num_output < self.request.params.min_tokens


def _inside(ids: Iterable[int], vocab_size: int) -> list[int]:
    return [i for i in ids if 0 <= i < vocab_size]


def _ends_with(tokens: list[int], ending: tuple[int, ...]) -> bool:
    return not ending or (len(tokens) >= len(ending) and tuple(tokens[-len(ending) :]) == ending)


def apply_rules(logits_RV: Tensor, rules: Sequence[RequestRules]) -> None:
    """Change float32 logits in place; one entry of `rules` a row."""
    _add_bias(logits_RV, rules)
    _penalise(logits_RV, rules)
    _forbid(logits_RV, rules)
    _allow_only(logits_RV, rules)


def _add_bias(logits_RV: Tensor, rules: Sequence[RequestRules]) -> None:
    if not any(len(rule.bias_ids) for rule in rules):
        return
    row_N, id_N = _places([rule.bias_ids for rule in rules], logits_RV.device)
    bias_N = torch.cat([rule.bias_values for rule in rules]).to(logits_RV.device)
    old_N = logits_RV[row_N, id_N]
    logits_RV[row_N, id_N] = _bounded(old_N + bias_N, old_N)


def _penalise(logits_RV: Tensor, rules: Sequence[RequestRules]) -> None:
    device = logits_RV.device
    counted = [(row, rule, rule.counts) for row, rule in enumerate(rules) if rule.counts is not None]
    if not counted:
        return
    sizes = [len(counts) for _, _, counts in counted]

    def spread(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.repeat_interleave(torch.tensor(list(values), dtype=dtype), torch.tensor(sizes)).to(
            device
        )

    row_N = spread((row for row, _, _ in counted), torch.int64)
    id_N = torch.cat([counts.ids for _, _, counts in counted]).to(device)
    count_N = torch.cat([counts.output_counts for _, _, counts in counted]).to(device)
    repetition_N = spread(rule.request.params.repetition_penalty for _, rule, _ in counted)
    frequency_N = spread(rule.request.params.frequency_penalty for _, rule, _ in counted)
    presence_N = spread(rule.request.params.presence_penalty for _, rule, _ in counted)

    old_N = logits_RV[row_N, id_N]
    new_N = torch.where(old_N > 0, old_N / repetition_N, old_N * repetition_N)
    new_N -= frequency_N * count_N
    new_N -= presence_N * (count_N > 0)
    logits_RV[row_N, id_N] = _bounded(new_N, old_N)


def _forbid(logits_RV: Tensor, rules: Sequence[RequestRules]) -> None:
    places = [(row, i) for row, rule in enumerate(rules) for i in rule.forbidden()]
    if places:
        row_N, id_N = torch.tensor(places, device=logits_RV.device).unbind(1)
        logits_RV[row_N, id_N] = FORBIDDEN


def _allow_only(logits_RV: Tensor, rules: Sequence[RequestRules]) -> None:
    for row, rule in enumerate(rules):
        if rule.allowed is not None:
            allowed = rule.allowed.to(logits_RV.device)
            kept = logits_RV[row, allowed]
            logits_RV[row] = FORBIDDEN
            logits_RV[row, allowed] = kept


def _places(ids: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(part) for part in ids])
    return torch.repeat_interleave(sizes).to(device), torch.cat(list(ids)).to(device)


def _bounded(new_N: Tensor, old_N: Tensor) -> Tensor:
    # A finite logit stays finite: an overflow must neither forbid a token nor look like a broken model.
    return torch.where(old_N.isfinite(), new_N.clamp(-_LARGEST, _LARGEST), old_N)
