"""Requests with any mix of parameters, and all that a client sees of their answers."""

import random

import pytest

from llmbox.engine.ipc.messages import AddRequest, RequestOutput
from support.real_engines import ask


def drawn(rng: random.Random, number: int) -> AddRequest:
    """Any mix of parameters that a request may have."""
    params = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
        "top_k": rng.choice([0, 0, 5, 300]),
        "top_p": rng.choice([1.0, 1.0, 0.8]),
        "min_p": rng.choice([0.0, 0.0, 0.05]),
        "seed": rng.randrange(-(1 << 63), 1 << 64),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.0, 1.3]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.0, 0.5]),
        "logit_bias": rng.choice([{}, {}, {7: 3.0, 9: -100.0}]),
        "bad_words": rng.choice([(), (), ((11,), (12, 13))]),
        "allowed_token_ids": rng.choice([None, None, None, tuple(range(20, 90))]),
        "min_tokens": rng.choice([0, 0, 6]),
        "stop_token_ids": rng.choice([(), tuple(range(60, 100))]),
        "logprobs": rng.choice([None, None, 0, 4]),
        "prompt_logprobs": rng.choice([None, None, None, 2]),
    }
    prompt = [rng.randrange(3, 320) for _ in range(rng.choice([1, 5, 16, 17, 40]))]
    return ask(f"r{number}", prompt, rng.randrange(1, 24), **params)


def told(outputs: list[RequestOutput]) -> tuple[object, ...]:
    """All that a client sees, but when."""
    ids = [token for output in outputs for token in output.token_ids]
    logprobs = [entry for output in outputs for entry in output.logprobs or []]
    prompt = [entry for output in outputs for entry in output.prompt_logprobs or []]
    return ids, rounded(logprobs), rounded(prompt), outputs[-1].finish_reason, outputs[-1].stop_token_id


def rounded(entries):
    """Sums in another batch differ in the last bits."""
    return [
        entry
        and (
            entry.token_id,
            pytest.approx(entry.logprob, abs=1e-4),
            entry.rank,
            [(token, pytest.approx(logprob, abs=1e-4)) for token, logprob in entry.top],
        )
        for entry in entries
    ]
