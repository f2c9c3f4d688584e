"""Sampler interface of the synchronous runner."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..core.request import Request
from ..core.step import SampledToken
from ..ipc.messages import TokenLogprobs


class TokenSampler(Protocol):
    """`Sampler`, or `TPSampler` and `NullSampler` where several ranks share a model."""

    def sample(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[SampledToken | str]: ...
    def prompt_logprobs(
        self, logits_TV: Tensor, next_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs]: ...
