import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbox.engine.sampling.logits_processors import LogitsProcessors, apply_rules, masked_ids
from support.lanes import examples
from support.sampling import make_request, plain_distribution

torch.set_num_threads(1)

VOCAB = 50


def random_logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def edited(logits: torch.Tensor, request) -> torch.Tensor:
    """The row after the rules, among neighbors of other kinds."""
    neighbors = [
        make_request("a"),
        make_request("b", logit_bias={1: 9.0}, frequency_penalty=1.0, output=[4]),
    ]
    rows = torch.stack([torch.zeros_like(logits), logits, torch.zeros_like(logits)])
    rules = [LogitsProcessors(one, len(logits)) for one in (neighbors[0], request, neighbors[1])]
    for rule in rules:
        rule.refresh()
    apply_rules(rows, rules)
    assert torch.equal(rows[0], torch.zeros_like(logits))
    return rows[1]


def by_transformers(logits: torch.Tensor, request, processor) -> torch.Tensor:
    return processor(torch.tensor([request.token_ids]), logits[None].clone())[0]


# ---------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_over_prompt_and_output(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    request = make_request(prompt=[3, 4, 3, 9], output=[7, 9, 7], repetition_penalty=penalty)
    expected = by_transformers(random_logits(), request, RepetitionPenaltyLogitsProcessor(penalty))
    assert torch.equal(edited(random_logits(), request), expected)


@pytest.mark.parametrize(
    "words",
    [
        [[5]],
        [[7, 9]],
        [[9, 7, 5], [1, 5]],
        [[3, 4, 3, 9, 7, 9, 7, 8]],
        [[0, 3, 4, 3, 9, 7, 9, 7, 8]],
        [[7, 9], [5], [7, 9, 7, 2]],
    ],
)
def test_bad_words(words):
    from transformers import NoBadWordsLogitsProcessor

    request = make_request(prompt=[3, 4, 3, 9], output=[7, 9, 7], bad_words=tuple(map(tuple, words)))
    expected = by_transformers(random_logits(), request, NoBadWordsLogitsProcessor(words))
    assert torch.equal(edited(random_logits(), request), expected)


def test_logit_bias():
    from transformers import SequenceBiasLogitsProcessor

    request = make_request(logit_bias={0: 2.5, 7: -100.0, 49: 100.0})
    bias = SequenceBiasLogitsProcessor([[[0], 2.5], [[7], -100.0], [[49], 100.0]])
    assert torch.equal(edited(random_logits(), request), by_transformers(random_logits(), request, bias))


@pytest.mark.parametrize("produced", [0, 1, 2, 3])
def test_min_tokens(produced):
    from transformers import MinNewTokensLengthLogitsProcessor

    request = make_request(output=[1] * produced, min_tokens=2, stop_token_ids=(4, 8))
    processor = MinNewTokensLengthLogitsProcessor(request.num_prompt, 2, [4, 8], device="cpu")
    expected = by_transformers(random_logits(), request, processor)
    assert torch.equal(edited(random_logits(), request), expected)


@given(st.integers(0, 1000), st.integers(1, 60), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
@settings(max_examples=examples(60))
def test_each_filter_keeps_what_transformers_keeps(seed, top_k, top_p, min_p):
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(seed)
    warpers = [
        ({"top_k": top_k}, TopKLogitsWarper(top_k)),
        ({"top_p": top_p}, TopPLogitsWarper(top_p)),
        ({"min_p": min_p}, MinPLogitsWarper(min_p)),
    ]
    for params, warper in warpers:
        request = make_request(**params)
        expected = by_transformers(logits, request, warper).isfinite().nonzero()[:, 0].tolist()
        assert sorted(token for token, _ in plain_distribution(logits, request.params)) == expected


# ---------------------------------------------------------------------------- of our own


def test_frequency_and_presence_count_output_only():
    request = make_request(prompt=[1, 1, 1], output=[2, 2, 3], frequency_penalty=0.5, presence_penalty=0.25)
    expected = random_logits()
    expected[2] -= 0.5 * 2 + 0.25
    expected[3] -= 0.5 + 0.25
    assert torch.allclose(edited(random_logits(), request), expected, atol=1e-6)


def test_allowed_ids_only():
    row = edited(random_logits(), make_request(allowed_token_ids=(3, 8, 3)))
    assert row.isfinite().nonzero()[:, 0].tolist() == [3, 8]
    assert row[3] == random_logits()[3]


def test_everything_at_once_in_order():
    """Bias, repetition, frequency and presence, then what is forbidden."""
    request = make_request(
        prompt=[1],
        output=[2, 2],
        logit_bias={2: 1.0, 5: 50.0},
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.1,
        bad_words=((5,),),
        allowed_token_ids=(1, 2, 5, 6),
    )
    row = edited(torch.full((VOCAB,), 3.0), request)
    assert row[1] == 1.5
    assert row[2] == pytest.approx((3.0 + 1.0) / 2.0 - 0.5 * 2 - 0.1)
    assert row[5] == -math.inf
    assert row[6] == 3.0
    assert row.isfinite().sum() == 3


def test_ids_outside_the_vocabulary_are_ignored():
    request = make_request(
        logit_bias={VOCAB: 5.0, -1: 5.0},
        bad_words=((VOCAB + 7,), (-2,), ()),
        stop_token_ids=(VOCAB, 10**6),
        min_tokens=5,
        allowed_token_ids=(*range(VOCAB), VOCAB + 3),
    )
    assert torch.equal(edited(random_logits(), request), random_logits())


def test_penalties_never_overflow():
    row = edited(torch.full((VOCAB,), -3e38), make_request(prompt=[1], repetition_penalty=2.0))
    assert row[1] == torch.finfo(torch.float32).min
    row = edited(torch.full((VOCAB,), 3e38), make_request(prompt=[1], repetition_penalty=0.01))
    assert row[1] == torch.finfo(torch.float32).max


@given(st.lists(st.integers(0, VOCAB - 1), max_size=60), st.integers(0, 60), st.booleans())
@settings(max_examples=examples(100))
def test_counts_kept_step_by_step_equal_counts_from_scratch(output, start, over_prompt):
    params = {
        "frequency_penalty": 0.5,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.5 if over_prompt else 1.0,
    }
    request = make_request(output=output[:start], **params)
    kept = LogitsProcessors(request, VOCAB)
    for token in output[start:]:
        request.token_ids.append(token)
        kept.refresh()
    fresh = LogitsProcessors(request, VOCAB)
    assert kept.refresh() == fresh.refresh()
    rows = torch.stack([random_logits(), random_logits()])
    apply_rules(rows, [kept, fresh])
    assert torch.equal(rows[0], rows[1])
    seen = set(output) | (set(request.prompt_ids) if over_prompt else set())
    assert (rows[0] != random_logits()).nonzero()[:, 0].tolist() == sorted(seen)


def test_penalties_start_with_the_first_output_token():
    request = make_request(presence_penalty=1.0)
    rules = LogitsProcessors(request, VOCAB)
    assert not rules.refresh()
    request.token_ids.append(9)
    assert rules.refresh()


@pytest.mark.parametrize("size", [1, 40, 4001])
def test_ids_of_a_mask_are_its_bits(size):
    """Full ones and sparse ones are read in different ways."""
    rng = random.Random(size)
    for kinds in ([255, 3], [0, 0, 129], [0] * 40 + [1, 200]):
        mask = bytes(rng.choice(kinds) for _ in range(size))
        wanted = [i for i in range(8 * size) if mask[i // 8] >> i % 8 & 1]
        assert masked_ids(mask, None).tolist() == wanted
        listed = torch.arange(0, 8 * size, 3)
        assert masked_ids(mask, listed).tolist() == [i for i in wanted if i % 3 == 0]
