"""Requests and a slow, plain sampler to compare with."""

from collections.abc import Sequence
from typing import Any

import torch

from llmbox.engine.core.request import Request
from llmbox.engine.core.step import SampledToken
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling_params import SamplingParams
from llmbox.kernels.reference.sampling import ONE, integer_softmax
from llmbox.kernels.sampling_types import SampleRows
from support.noise import uniform

CPU = torch.device("cpu")


def make_request(
    name: str = "r", *, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **params: Any
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=list(prompt),
        params=SamplingParams(**{"max_tokens": 100, **params}),
        token_ids=[*prompt, *output],
    )


def sample_one(logits: torch.Tensor, request: Request) -> SampledToken | str:
    return Sampler(logits.shape[-1], CPU).sample(logits.reshape(1, -1), [request])[0]


def token_of(result: SampledToken | str) -> int:
    assert isinstance(result, SampledToken), result
    return result.token_id


def plain_distribution(logits: torch.Tensor, params: SamplingParams) -> list[tuple[int, int]]:
    """(id, weight) of what may be drawn, in drawing order. Weights are the integers that the sampler uses."""
    row = logits.float().reshape(1, -1)
    best = row.amax(-1, keepdim=True)
    weight = integer_softmax(row, best, torch.tensor([params.temperature], dtype=torch.float64))[0].tolist()
    values, ids = row[0].tolist(), list(range(row.shape[1]))
    ranked = 0 < params.top_k < len(ids) or params.top_p < 1
    if ranked:
        ids.sort(key=lambda i: (-values[i], i))
    kept = [i for i in ids if weight[i] >= int(params.min_p * ONE)]
    if ranked and params.top_k:
        kept = [i for i in kept if i in set(ids[: params.top_k])]
    if ranked:
        limit, before, nucleus = params.top_p * float(sum(weight[i] for i in kept)), 0, []
        for i in kept:
            if before < limit:
                nucleus.append(i)
            before += weight[i]
        kept = nucleus
    return [(i, weight[i]) for i in kept if weight[i]]


def plain_choice(logits: torch.Tensor, request: Request) -> int:
    params = request.params
    if params.temperature == 0:
        values = logits.float().tolist()
        return values.index(max(values))
    choices = plain_distribution(logits, params)
    total = sum(weight for _, weight in choices)
    point = min(int(uniform(params.seed, request.num_tokens) * total), total - 1)
    for token, weight in choices:
        if point < weight:
            return token
        point -= weight
    raise AssertionError("unreachable")


def sample_rows_by(
    rows: Sequence[tuple[float, int, float, float]], seeds: Sequence[int], positions: Sequence[int]
) -> SampleRows:
    """Rows of (temperature, top-k, top-p, min-p), with log-probabilities wanted."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SampleRows(
        temperature=torch.tensor(temperature, dtype=torch.float64),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        top_p=torch.tensor(top_p, dtype=torch.float64),
        min_p=torch.tensor(min_p, dtype=torch.float64),
        seed=torch.tensor(seeds),
        position=torch.tensor(positions),
        logprobs=torch.ones(len(rows), dtype=torch.int32),
    )
