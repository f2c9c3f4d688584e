"""Results of a launched step: its tokens, log-probabilities of prompts, pooled states for embeddings.

On a GPU they are asynchronous: the device computes numbers that are copied to the host, and read when the
step is collected.

A vector of a text is the mean of the final hidden states of some of its rows. States are summed as integers,
in units of `UNIT`, so that the sum does not depend on its order: a text has the same vector alone and in a
batch, in one step and in chunks. The unit is far below float32's resolution of a vector of length 1.

P rows of a step's prompts, then pooled rows, G of them at once, M of those on this rank, K pooling requests,
E hidden, V this rank's vocabulary shard, C columns of `rank_columns`.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from llmbox.kernels.lora import LoraTiles
from llmbox.kernels.reference.sampling import rank_tokens

from ..core.request import Request
from ..core.step import UNIT, ScheduledRequest, StepResult
from ..device.device import Device, DeviceEvent, to_host
from ..ipc.messages import TokenLogprobs
from ..model.decoder import Decoder
from ..model.draft_heads import DraftHead
from ..planning.memory_model import PROMPT_LOGPROB_ROWS
from ..sampling.device_sampler import DeviceSamplerOutput
from ..sampling.sampler import logprobs_of, rank_column_count, rank_columns
from .draft_verification import accept_drafts
from .gpu_inputs import MixedStep
from .input_batch import PooledRows, PromptRows

_BOUND: Final = 2.0**16
"""Upper bound of hidden states, above those of any sound model. The int64 sum holds 2^17 rows below it."""
_AT_ONCE: Final = 256
"""Rows converted to integers at once, to bound memory."""


@dataclass(frozen=True, slots=True)
class PromptNumbers:
    prompts: Sequence[PromptRows]
    numbers_PC: Tensor
    """float64 on the host, valid after the step's event."""
    top: int
    """Alternatives in each row."""

    def read(self) -> dict[str, list[TokenLogprobs]]:
        """Build log-probability entries by request id."""
        rows = iter(self.numbers_PC.tolist())
        return {
            prompt.request.request_id: [
                logprobs_of(next(rows), token, prompt.top, self.top) for token in prompt.next_ids
            ]
            for prompt in self.prompts
        }


@dataclass(frozen=True, slots=True)
class StepExtras:
    """Results of a step other than its tokens, on the host; valid after the step's event."""

    prompts: PromptNumbers | None = None
    pooled: Sequence[PooledRows] = ()
    sums_KE: Tensor | None = None
    """Result of `sum_states`."""

    def read(self) -> StepResult:
        result = StepResult(prompt_logprobs=self.prompts.read() if self.prompts is not None else {})
        if self.sums_KE is not None:
            result.add(read_sums(self.sums_KE, self.pooled))
        return result


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """Handle of a launched step."""

    event: DeviceEvent
    sampled: DeviceSamplerOutput | None
    numbers_SC: Tensor | None
    """Sampler output on the host; valid after the event."""
    extras: StepExtras | None = None
    rows: Sequence[ScheduledRequest] = ()
    features_TF: Tensor | None = None
    """Input of a draft head, for the rows."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Requests whose adapter could not be loaded, with the reason."""

    def wait(self) -> None:
        self.event.wait()

    def read(self) -> StepResult:
        """Wait for the step and return its results."""
        self.event.wait()
        result = self.extras.read() if self.extras is not None else StepResult()
        if self.sampled is not None and self.numbers_SC is not None:
            sampling = [row for row in self.rows if row.samples]
            result.add(accept_drafts(sampling, self.sampled.read(self.numbers_SC.tolist())))
        result.failed.update(self.failed)
        return result


def queue_extras(
    step: MixedStep,
    hidden_PE: Tensor,
    model: Decoder | DraftHead,
    device: Device,
    of_logits: Callable[[Sequence[Request]], LoraTiles | None],
) -> StepExtras | None:
    """Queue prompt log-probabilities and pooling; None where a step has none. `of_logits`: tiles of rows of
    logits of these requests.
    """
    if not (step.prompts or step.pooled) or not model.rank.layout.is_last:
        return None
    prompts, sums_KE, count = None, None, len(step.next_P)
    if step.prompts:
        vocab_size = model.config.vocab_size
        top = min(max(prompt.top for prompt in step.prompts), vocab_size)
        adapted = [request for prompt in step.prompts for request in [prompt.request] * len(prompt.next_ids)]
        numbers_PC = prompt_numbers(
            model, hidden_PE[:count], step.next_P, top, vocab_size, lambda part: of_logits(adapted[part])
        )
        prompts = PromptNumbers(step.prompts, to_host(numbers_PC, device), top)
    if step.pooled:
        sums_KE = to_host(sum_states(hidden_PE[count:], step.pooled), device)
    return StepExtras(prompts, step.pooled, sums_KE)


def prompt_numbers(
    model: Decoder | DraftHead,
    hidden_PE: Tensor,
    next_P: Tensor,
    top: int,
    vocab_size: int,
    adapted: Callable[[slice], LoraTiles | None],
) -> Tensor:
    """Compute `PromptNumbers.numbers_PC` on the device. `adapted`: which of some rows have an adapter."""
    at_once = PROMPT_LOGPROB_ROWS * model.rank.layout.tp
    starts = range(0, len(hidden_PE), at_once)
    parts = zip(torch.split(hidden_PE, at_once), torch.split(next_P, at_once), starts, strict=True)

    def rank(next_G: Tensor, whole_MV: Tensor, mine: slice) -> Tensor:
        return rank_columns(rank_tokens(whole_MV[:, :vocab_size], next_G[mine], top))

    return torch.cat(
        [
            model.rank.map_whole_rows(
                model.logits(hidden_GE, adapted(slice(start, start + at_once))),
                rank_column_count(top),
                partial(rank, next_G),
            )
            for hidden_GE, next_G, start in parts
        ]
    )


def sum_states(hidden_PE: Tensor, pooled: Sequence[PooledRows]) -> Tensor:
    """Sum hidden states per request, on the device: int64 [K, E + 1], in units; the last column counts NaN,
    infinite and too large states.
    """
    sums = []
    for states_E in torch.split(hidden_PE, [rows.count for rows in pooled]):
        parts = torch.split(states_E, _AT_ONCE)
        sums.append(torch.stack([_sum(part) for part in parts]).sum(0))
    return torch.stack(sums)


def _sum(states_PE: Tensor) -> Tensor:
    wide_PE = states_PE.double()
    sound_PE = wide_PE.abs() < _BOUND
    units_PE = torch.where(sound_PE, wide_PE / UNIT, 0.0).round().long()
    return torch.cat((units_PE.sum(0), (~sound_PE).sum().view(1)))


def read_sums(sums_KE: Tensor, pooled: Sequence[PooledRows]) -> StepResult:
    """Read a result of `sum_states` on the host."""
    result = StepResult()
    for rows, (*units, wrong) in zip(pooled, sums_KE.tolist(), strict=True):
        if wrong:
            result.failed[rows.request.request_id] = (
                f"{wrong} of the model's states are no numbers (NaN or infinite): its weights may "
                "be damaged, or its numbers too large for the format"
            )
        else:
            result.pooled[rows.request.request_id] = array("q", units)
    return result
