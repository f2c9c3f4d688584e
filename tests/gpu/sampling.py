"""The sampler's kernels against their meaning in plain torch: whole rows, and rows with rules."""

from dataclasses import fields

import torch
from torch import Tensor

from gpu.checks import Check, Checks, Setting, name_of
from llmbox.engine.device.device import CudaDevice, HostDevice
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling.logits_processors import LogitsProcessors, apply_rules
from llmbox.kernels.reference.sampling import SamplingKinds, sample_rows
from llmbox.kernels.sampling_types import SampleRows
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.sampling.penalties import edit
from support.device_steps import Steps
from support.sampling import make_request, sample_rows_by

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
    seeds = [setting.seed + n for n in range(len(kinds))]
    asked = sample_rows_by(kinds, seeds, range(len(kinds)))
    asked = SampleRows(*(getattr(asked, field.name).to(setting.device) for field in fields(SampleRows)))
    got = triton_ops(setting.device, dtype).sample(logits, asked)
    exact, _ = sample_rows(logits, asked, SamplingKinds(whole=True, candidates=vocabulary))
    wrong = int((got.ids != exact).sum())
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
