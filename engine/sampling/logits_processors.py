"""Logits processors: changes that a request's parameters make to its logits before sampling.

In vLLM's order: logit bias; repetition, frequency and presence penalties; then forbidden ids (bad words, stop
ids before `min_tokens`, ids outside `allowed_token_ids`, ids outside the grammar's mask). If no id is left,
the row has no token and fails.

Only affected ids are read and written. R rows, V vocabulary, N affected entries of all rows together.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmbox.kernels.sampling_types import LogitEdits

from ..core.request import Request
from ..device.device import move


class TokenCounts:
    """Distinct ids that penalties affect, and their counts in the output.

    Prompt ids are included, with count 0, only where the repetition penalty needs them. Tensors grow by
    doubling, so that a step costs one write and no rebuild.
    """

    def __init__(self, request: Request) -> None:
        output = Counter(request.token_ids[request.num_prompt :])
        counts = dict.fromkeys(request.prompt_ids, 0) if request.params.repetition_penalty != 1.0 else {}
        counts.update(output)
        self._slots = {token: slot for slot, token in enumerate(counts)}
        self._seen = request.num_tokens
        self._ids = torch.tensor(list(counts), dtype=torch.int64)
        self._output_counts = torch.tensor(list(counts.values()), dtype=torch.float32)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> Tensor:
        return self._output_counts[: len(self._slots)]

    def catch_up(self, request: Request) -> None:
        """Count the tokens appended since the last call."""
        for token in request.token_ids[self._seen :]:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._add(token)
            self._output_counts[slot] += 1
        self._seen = request.num_tokens

    def _add(self, token: int) -> int:
        slot = len(self._slots)
        if slot == len(self._ids):
            room = max(16, slot)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(room)])
            self._output_counts = torch.cat([self._output_counts, self._output_counts.new_zeros(room)])
        self._slots[token] = slot
        self._ids[slot] = token
        return slot


_LARGEST = torch.finfo(torch.float32).max
FORBIDDEN = float("-inf")
_NO_IDS = torch.empty(0, dtype=torch.int64)
_NO_COUNTS = torch.empty(0)
_EIGHT = torch.arange(8, dtype=torch.uint8)


class LogitsProcessors:
    """Logits processors of one request, kept between steps so that a step costs only its new tokens.

    Ids outside the vocabulary are dropped: an end-of-sequence id that the model cannot produce is no error.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = request.params
        self.request = request
        self._admission = request.admissions
        self.lacks_last = False
        """True where the last token is not in the request yet, but only on the device."""
        self.counts = TokenCounts(request) if params.penalizes else None
        bias = {i: value for i, value in params.logit_bias.items() if 0 <= i < vocab_size}
        self.bias_ids = torch.tensor(list(bias), dtype=torch.int64)
        self.bias_values = torch.tensor(list(bias.values()), dtype=torch.float32)
        self._listed: Tensor | None = None
        if params.allowed_token_ids is not None:
            allowed = _inside(sorted(set(params.allowed_token_ids)), vocab_size)
            self._listed = torch.tensor(allowed, dtype=torch.int64)
        self.allowed = self._listed
        """Allowed next ids, ascending; None: all."""
        self._stop_ids = _inside(params.stop_token_ids, vocab_size)
        self._bad_words = [word for word in params.bad_words if word and 0 <= word[-1] < vocab_size]

    @property
    def is_current(self) -> bool:
        """True as long as the request has run without a preemption since this was created."""
        return self.request.admissions == self._admission

    def refresh(self) -> bool:
        """Process the tokens since the last call; return whether logits change in this step."""
        assert self.request.num_unknown <= 1
        self.lacks_last = self.request.num_unknown == 1
        if self.counts is not None:
            self.counts.catch_up(self.request)
        mask = self.request.mask
        self.allowed = self._listed if mask is None else masked_ids(mask, self._listed)
        penalised = self.counts is not None and (len(self.counts) > 0 or self.lacks_last)
        fixed = self.allowed is not None or len(self.bias_ids) > 0
        return penalised or fixed or bool(self._bad_words) or self._too_short()

    def forbidden(self) -> list[int]:
        """Return forbidden next ids. Bad words are matched over prompt and output, as in transformers."""
        ids = [word[-1] for word in self._bad_words if self._is_certain(word)]
        return ids + self._stop_ids if self._too_short() else ids

    def forbidden_after(self) -> list[tuple[int, int]]:
        """Return (last token, id forbidden after it), where the last token is only known on the device."""
        if not self.lacks_last:
            return []
        tokens = self.request.token_ids
        longer = (word for word in self._bad_words if len(word) > 1)
        return [(word[-2], word[-1]) for word in longer if _ends_with(tokens, word[:-2])]

    def edits(self) -> LogitEdits:
        """Describe the changes of `apply_rules` to the row, for `Ops.draw`."""
        assert not self.lacks_last
        params, counts = self.request.params, self.counts
        return LogitEdits(
            self.bias_ids,
            self.bias_values,
            _NO_IDS if counts is None else counts.ids,
            _NO_COUNTS if counts is None else counts.output_counts,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            self.forbidden(),
            self.allowed,
        )

    def _is_certain(self, word: tuple[int, ...]) -> bool:
        if self.lacks_last:
            return len(word) == 1
        return _ends_with(self.request.token_ids, word[:-1])

    def _too_short(self) -> bool:
        return bool(self._stop_ids) and self.request.num_output_before < self.request.params.min_tokens


class LogitsProcessorCache:
    """Logits processors of running requests, kept so that tokens are not counted again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rules: dict[str, LogitsProcessors] = {}

    def clear(self) -> None:
        """Forget the counts of all requests."""
        self._rules.clear()

    def forget(self, requests: Sequence[Request]) -> None:
        """Forget the counts of these requests."""
        for request in requests:
            self._rules.pop(request.request_id, None)

    def active(self, requests: Sequence[Request]) -> dict[str, LogitsProcessors]:
        """Return, by request id, the processors that change logits; drop requests that ceased to run."""
        self._rules = {name: rules for name, rules in self._rules.items() if rules.is_current}
        active = {}
        for request in requests:
            if request.mask is None and not request.edits_logits:
                continue
            rules = self._rules.get(request.request_id)
            if rules is None or rules.request is not request:
                rules = self._rules[request.request_id] = LogitsProcessors(request, self._vocab_size)
            if rules.refresh():
                active[request.request_id] = rules
        return active

    def apply(self, logits_RV: Tensor, requests: Sequence[Request], last_R: Tensor | None = None) -> Tensor:
        """Return a changed float32 copy, or the same tensor where no processor changes it.

        `last_R`: see `apply_rules`.
        """
        active = self.active(requests)
        if not active:
            return logits_RV
        places = [row for row, request in enumerate(requests) if request.request_id in active]
        place_E = move(torch.tensor(places), logits_RV.device)
        edited_RV = logits_RV.to(torch.float32, copy=True)
        part_EV = edited_RV.index_select(0, place_E)
        rules = [active[requests[row].request_id] for row in places]
        apply_rules(part_EV, rules, None if last_R is None else last_R[place_E])
        return edited_RV.index_copy_(0, place_E, part_EV)


def pad_vocabulary(logits_RV: Tensor, vocab_size: int) -> Tensor:
    """Return logits of at least so many ids; those that were missing are forbidden."""
    missing = vocab_size - logits_RV.shape[1]
    return pad(logits_RV, (0, missing), value=FORBIDDEN) if missing > 0 else logits_RV


def mask_bits(masks: Sequence[bytes]) -> Tensor:
    """Unpack bit masks of one size to uint8 [masks, 8 · bytes], 1 where an id is allowed next."""
    bytes_MB = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8).view(len(masks), -1)
    return ((bytes_MB[:, :, None] >> _EIGHT) & 1).flatten(1)


def masked_ids(mask: bytes, listed: Tensor | None) -> Tensor:
    """Return the ids that the mask allows, ascending, restricted to `listed`.

    Where a mask allows few ids, whole zero bytes are skipped.
    """
    if listed is not None:
        return listed[mask_bits([mask])[0][listed] > 0]
    byte_B = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    place_P = byte_B.nonzero()[:, 0]
    if len(place_P) > len(byte_B) // 8:
        return mask_bits([mask])[0].nonzero()[:, 0]
    bit_P8 = (byte_B[place_P, None] >> _EIGHT) & 1
    return (place_P[:, None] * 8 + _EIGHT)[bit_P8 > 0]


def _inside(ids: Iterable[int], vocab_size: int) -> list[int]:
    return [i for i in ids if 0 <= i < vocab_size]


def _ends_with(tokens: list[int], ending: tuple[int, ...]) -> bool:
    return not ending or (len(tokens) >= len(ending) and tuple(tokens[-len(ending) :]) == ending)


def apply_rules(logits_RV: Tensor, rules: Sequence[LogitsProcessors], last_R: Tensor | None = None) -> None:
    """Change float32 logits in place; one entry of `rules` per row.

    `last_R`: each row's last token, on the device; read where the host does not know it yet.
    """
    _add_bias(logits_RV, rules)
    _penalise(logits_RV, rules, last_R)
    _forbid(logits_RV, rules)
    _forbid_after(logits_RV, rules, last_R)
    _allow_only(logits_RV, rules)


def _add_bias(logits_RV: Tensor, rules: Sequence[LogitsProcessors]) -> None:
    if not any(len(rule.bias_ids) for rule in rules):
        return
    row_N, id_N = _places([rule.bias_ids for rule in rules], logits_RV.device)
    bias_N = move(torch.cat([rule.bias_values for rule in rules]), logits_RV.device)
    old_N = logits_RV[row_N, id_N]
    logits_RV[row_N, id_N] = _bounded(old_N + bias_N, old_N)


def _penalise(logits_RV: Tensor, rules: Sequence[LogitsProcessors], last_R: Tensor | None) -> None:
    device = logits_RV.device
    counted = [(row, rule, rule.counts) for row, rule in enumerate(rules) if rule.counts is not None]
    if not counted:
        return
    sizes = torch.tensor([len(counts) for _, _, counts in counted])
    row_N = move(torch.repeat_interleave(torch.tensor([row for row, _, _ in counted]), sizes), device)
    id_N = move(torch.cat([counts.ids for _, _, counts in counted]), device)
    count_N = move(torch.cat([counts.output_counts for _, _, counts in counted]), device)
    penalties_N3 = move(
        torch.repeat_interleave(_penalties([rule for _, rule, _ in counted]), sizes, 0), device
    )
    new_N = _penalised(logits_RV[row_N, id_N], count_N, penalties_N3)

    lacking = [(row, rule) for row, rule, _ in counted if rule.lacks_last]
    if not lacking:
        logits_RV[row_N, id_N] = new_N
        return
    assert last_R is not None
    row_L = move(torch.tensor([row for row, _ in lacking]), device)
    id_L = last_R[row_L]
    known_R = count_N.new_zeros(len(rules))
    known_R.index_add_(0, row_N, torch.where(id_N == last_R[row_N], count_N, 0.0))
    penalties_L3 = move(_penalties([rule for _, rule in lacking]), device)
    new_L = _penalised(logits_RV[row_L, id_L], known_R[row_L] + 1, penalties_L3)
    logits_RV[row_N, id_N] = new_N
    logits_RV[row_L, id_L] = new_L


def _penalties(rules: Sequence[LogitsProcessors]) -> Tensor:
    """[rules, 3]: repetition, frequency, presence."""
    params = [rule.request.params for rule in rules]
    return torch.tensor([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params])


def _penalised(old_N: Tensor, count_N: Tensor, penalties_N3: Tensor) -> Tensor:
    repetition_N, frequency_N, presence_N = penalties_N3.unbind(1)
    new_N = torch.where(old_N > 0, old_N / repetition_N, old_N * repetition_N)
    new_N -= frequency_N * count_N
    new_N -= presence_N * (count_N > 0)
    return _bounded(new_N, old_N)


def _forbid(logits_RV: Tensor, rules: Sequence[LogitsProcessors]) -> None:
    places = [(row, i) for row, rule in enumerate(rules) for i in rule.forbidden()]
    if places:
        row_N, id_N = move(torch.tensor(places), logits_RV.device).unbind(1)
        logits_RV[row_N, id_N] = FORBIDDEN


def _forbid_after(logits_RV: Tensor, rules: Sequence[LogitsProcessors], last_R: Tensor | None) -> None:
    places = [(row, last, i) for row, rule in enumerate(rules) for last, i in rule.forbidden_after()]
    if not places:
        return
    assert last_R is not None
    row_N, asked_N, id_N = move(torch.tensor(places), logits_RV.device).unbind(1)
    # Accumulated, as an id may be forbidden after several tokens, of which one is the last.
    change_N = torch.where(last_R[row_N] == asked_N, FORBIDDEN, 0.0)
    logits_RV.index_put_((row_N, id_N), change_N, accumulate=True)


def _allow_only(logits_RV: Tensor, rules: Sequence[LogitsProcessors]) -> None:
    for row, rule in enumerate(rules):
        if rule.allowed is not None:
            allowed = move(rule.allowed, logits_RV.device)
            kept = logits_RV[row, allowed]
            logits_RV[row] = FORBIDDEN
            logits_RV[row, allowed] = kept


def _places(ids: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor([len(part) for part in ids])
    return move(torch.repeat_interleave(sizes), device), move(torch.cat(list(ids)), device)


def _bounded(new_N: Tensor, old_N: Tensor) -> Tensor:
    # A finite logit stays finite: an overflow must neither forbid a token nor look like a damaged model.
    return torch.where(old_N.isfinite(), new_N.clamp(-_LARGEST, _LARGEST), old_N)
