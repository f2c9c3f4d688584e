"""The sampler's kernels against the engine's own sampler: whole rows, rows with rules, and rows in parts."""

import torch
from torch import Tensor

from gpu.checks import Check, Checks, Setting, name_of
from llmbox.engine.device.device import CudaDevice, HostDevice
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling.draw import (
    SamplingTensors,
    draw_greedy,
    draw_ranked,
    draw_whole,
    invert,
    weights_above,
)
from llmbox.engine.sampling.logits_processors import LogitsProcessors, apply_rules
from llmbox.engine.sampling.philox import uniform
from llmbox.kernels.sampling_types import SampleRows
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.sampling.penalties import edit
from support.device_steps import Steps
from support.sampling import make_request

FEW_WRONG = 0.02
"""The device's exp differs in its last bits, which moves a draw about once in 10^5."""
RULES = (
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {5: 3.0, 9: -4.0}},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 0.8, "bad_words": ((5,), (7, 9))},
    {"temperature": 1.2, "top_k": 20, "min_tokens": 2, "stop_token_ids": (5, 11), "logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(3, 80)), "frequency_penalty": 1.0},
)


def drawn(setting: Setting, dtype: torch.dtype) -> Checks:
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 40, 0.95, 0.0), (1.2, 0, 0.9, 0.02)]
    kinds = kinds[1:3] if setting.tiny else kinds * 16
    vocabulary = 300 if setting.tiny else 151936
    logits = 4 * setting.randn(len(kinds), vocabulary, dtype=dtype)
    float64 = [torch.tensor(x, dtype=torch.float64) for x in zip(*kinds, strict=True)]
    seeds = [setting.seed + n for n in range(len(kinds))]
    asked = SampleRows(
        float64[0].to(setting.device),
        float64[1].int().to(setting.device),
        float64[2].to(setting.device),
        float64[3].to(setting.device),
        torch.tensor(seeds, device=setting.device),
        torch.arange(len(kinds), device=setting.device),
        torch.ones(len(kinds), dtype=torch.int32, device=setting.device),
    )
    ops = triton_ops(setting.device, dtype)
    got = ops.sample(logits, asked)
    wrong = 0
    for n, (temperature, top_k, top_p, min_p) in enumerate(kinds):
        row, device = logits[n : n + 1].float(), setting.device
        knobs = SamplingTensors(
            torch.tensor([temperature], device=device, dtype=torch.float64),
            torch.tensor([top_k or vocabulary], device=device),
            torch.tensor([top_p], device=device, dtype=torch.float64),
            torch.tensor([min_p], device=device, dtype=torch.float64),
            torch.tensor([uniform(seeds[n], n)], device=device, dtype=torch.float64),
        )
        if temperature == 0:
            exact = draw_greedy(row)
        elif not top_k and top_p == 1:
            exact = draw_whole(row, knobs)
        else:
            exact = draw_ranked(row, knobs, vocabulary, cuts_k=top_k > 0)
        wrong += int(exact.id) != int(got.ids[n])
    # The device's exp differs in its last bits, which moves a draw about once in 10^5.
    yield Check(name_of("drawn ids", dtype), wrong / len(kinds), 0.02)
    logprob = got.logit - got.best - torch.log(got.total.double() / 2**40)
    exact = logits.double().log_softmax(-1).gather(1, got.ids[:, None])[:, 0]
    yield Check(name_of("logprobs", dtype), float((logprob - exact).abs().max()), 1e-4)


def ruled(setting: Setting, dtype: torch.dtype) -> Checks:
    """Step by step, with a host that is a token behind."""
    device, vocabulary = setting.device, 300 if setting.tiny else 151936
    requests = [
        make_request(f"{n}", prompt=[n, 5, 200, 5], output=[7, 7, 11], seed=setting.seed + n, **rules)
        for n, rules in enumerate(RULES * (1 if setting.tiny else 8))
    ]
    ops = triton_ops(device, dtype)
    steps = Steps(
        ops, vocabulary, requests, CudaDevice(device) if device.type == "cuda" else HostDevice(), True
    )
    wrong = touched = 0
    count = 2 if setting.tiny else 6
    for _ in range(count):
        logits = 3 * setting.randn(len(requests), vocabulary, dtype=dtype)
        before = logits.clone()
        wanted = Sampler(vocabulary, device).sample(logits, steps.known)
        found = steps.draw(logits)
        pairs = zip(found, wanted, strict=True)
        wrong += sum(isinstance(a, str) or a.token_id != b.token_id for a, b in pairs)
        touched += int((logits != before).sum())
    yield Check(name_of("drawn by rules", dtype), wrong / count / len(requests), FEW_WRONG)
    yield Check(name_of("logits after rules", dtype), float(touched), 0.0)
    logits = 3 * setting.randn(len(requests), vocabulary, dtype=dtype)
    yield Check(name_of("changed logits", dtype), float(not _changed_alike(logits, requests, steps)), 0.0)


def _changed_alike(logits: Tensor, requests: list, steps: Steps) -> bool:
    """Bit by bit."""
    row_S, position_S = steps.note()
    rules = [LogitsProcessors(request, logits.shape[1]) for request in requests]
    for each in rules:
        each.refresh()
    wanted = logits.to(torch.float32, copy=True)
    apply_rules(wanted, rules, steps.rows.last_R[row_S])
    lists = steps.rows.rules.of(row_S, steps.rows.last_R, requests)
    edit(logits, position_S, lists)
    found = logits.float()
    for row, number in enumerate(row_S.tolist()):
        first, count = lists.facts_R5[number, :2].tolist()
        entries = slice(first, first + count)
        found[row, lists.marks_3N[0, entries].long()] = lists.values_3N[2, entries]
        if requests[row].params.allowed_token_ids is not None:
            found[row, 80:] = found[row, :3] = -torch.inf
    return torch.equal(found, wanted)


def in_parts(setting: Setting, dtype: torch.dtype) -> Checks:
    """What ranks that share the vocabulary ask of their parts."""
    device, vocabulary = setting.device, 300 if setting.tiny else 75968
    ks = (1, 20) if setting.tiny else (1, 20, 50, 400) * 8
    count, width = len(ks), max(ks)
    logits = 4 * setting.randn(count, vocabulary, dtype=dtype)
    parts = triton_ops(device, dtype).parts
    assert parts is not None

    def each(number: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((count,), number, dtype=dtype, device=device)

    seeds = torch.arange(count, device=device) + setting.seed
    k = torch.tensor(ks, dtype=torch.int32, device=device)
    asked = SampleRows(each(0.9), k, each(1.0), each(0.001), seeds, seeds, each(0, torch.int32))
    found = parts.candidates(logits, asked, width, 1000)
    order = torch.sort(logits.float(), descending=True, stable=True).indices
    wrong = sum(
        not torch.equal((found[row, :k] & 0xFFFFFFFF) - 1000, order[row, :k].sort().values)
        for row, k in enumerate(ks)
    )
    yield Check(name_of("candidates", dtype), float(wrong), 0.0)
    best = logits.float().amax(-1) + 0.5
    knobs = SamplingTensors(asked.temperature, k.long(), asked.top_p, asked.min_p, asked.top_p)
    until = weights_above(logits.float(), best[:, None], knobs).cumsum(-1)
    weighed = parts.weigh(logits, best, asked)
    error = (weighed.total_R.double() / until[:, -1].double() - 1).abs().max()
    yield Check(name_of("weights of a part", dtype), float(error), 1e-6)
    point = (until[:, -1].double() * torch.linspace(0, 0.99, count, device=device).double()).long()
    moved = (weighed.columns(point) != invert(until, point)).float().mean()
    yield Check(name_of("ids at a sum of weights", dtype), float(moved), 0.1)
    noise = [uniform(setting.seed + n, setting.seed + n) for n in range(count)]
    yield Check(name_of("noise", dtype), float(parts.noise(asked).tolist() != noise), 0.0)
