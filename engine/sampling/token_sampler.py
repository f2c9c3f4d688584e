"""The sampler as runners see it."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..core.request import Request
from ..core.step import SampledToken
from ..ipc.messages import TokenLogprobs


class TokenSampler(Protocol):
    """`Sampler`, or what stands for it where logits are shared among ranks."""

    def sample(self, logits_RV: Tensor, requests: Sequence[Request]) -> list[SampledToken | str]: ...
    def prompt_logprobs(
        self, logits_TV: Tensor, next_ids: Sequence[int], top: int
    ) -> list[TokenLogprobs]: ...
