"""Mixtures of experts: what is chosen, and one row, one result."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from llmbox.kernels.activation import Activation, LimitedSwiGLU
from llmbox.kernels.dispatch import load_backend, native_ready
from llmbox.kernels.op_types import ExpertOwners, ExpertResults, Mixture, Routing
from llmbox.kernels.ops import Ops
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.reference.moe import route, weigh
from support.lanes import every_pair

SHAPES = [(1, 32, 24, 4, 1), (7, 72, 40, 8, 3), (40, 130, 66, 5, 5), (260, 64, 32, 3, 2)]
"""Rows, hidden, inner, experts, chosen of them."""


def mixture_of(
    ops: Ops, hidden: int, inner: int, count: int, chosen: int, dtype: torch.dtype, *, normalized: bool = True
) -> Mixture:
    gate_ups = [torch.randn(2 * inner, hidden) / hidden**0.5 for _ in range(count)]
    downs = [torch.randn(hidden, inner) / inner**0.5 for _ in range(count)]
    pack = lambda weights: [ops.pack_linear(weight.to(dtype), None) for weight in weights]  # noqa: E731
    return Mixture(pack(gate_ups), pack(downs), count, chosen, normalized)


def by_linears(ops: Ops, mixture: Mixture, x_TE: Tensor, logits_TX: Tensor) -> Tensor:
    """[T, K, E] of each row alone through its experts."""
    chosen_TK, _ = route(logits_TX, mixture.per_token, mixture.normalized)
    rows = []
    for row, experts in enumerate(chosen_TK.tolist()):
        for expert in experts:
            gate_up = ops.linear(mixture.gate_ups[expert], x_TE[row : row + 1])
            rows.append(ops.linear(mixture.downs[expert], ops.gate_mul(gate_up, "silu"))[0].clone())
    return torch.stack(rows).view(*chosen_TK.shape, -1)


@pytest.mark.parametrize("normalized", [False, True])
def test_shares(normalized: bool) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    chosen, shares = route(logits, 2, normalized)
    assert chosen.tolist() == [[1, 3], [0, 1]], "of equal ones the lower number"
    expected = logits.softmax(1).gather(1, chosen)
    torch.testing.assert_close(shares, expected / expected.sum(1, keepdim=True) if normalized else expected)


CORRECTION = torch.tensor([0.0, 0.4, 0.0, -0.2, 0.0, 0.1, 0.0, 0.9])
ROUTINGS = [
    Routing(scale=2.5),
    Routing(correction_X=CORRECTION),
    Routing(scoring="sigmoid", correction_X=CORRECTION, scale=1.5),
    Routing(scoring="sigmoid_of_logits", correction_X=CORRECTION),
    Routing(scoring="sigmoid", groups=4, top_groups=2, group_best=2),
    Routing(groups=2, top_groups=1, correction_X=CORRECTION),
    Routing(factors_X=CORRECTION + 0.5),
    Routing(jitter=0.3),
    Routing(scoring="sigmoid", scales_inputs=True),
]


def test_sparsely_chosen_experts_are_weighed_among_those_near_the_best() -> None:
    """2.0 and 1.9 are near the best, 1.0 is not: (2 - 1) / 2 is more than 0.2."""
    chosen, shares = route(torch.tensor([[2.0, 1.0, 1.9, -3.0]]), 2, True, Routing(jitter=0.1))
    assert chosen.tolist() == [[0, 2]]
    first = torch.tensor([2.0, 1.9]).softmax(0)[0]
    torch.testing.assert_close(shares, torch.stack([first, torch.tensor(1.0)]).view(1, 2))


@pytest.mark.parametrize("normalized", [False, True])
def test_groups_and_corrections_choose_but_do_not_weigh(normalized: bool) -> None:
    logits = torch.tensor([[2.0, -1.0, 0.0, 1.9, 0.5, 0.4, -3.0, -3.0]])
    routing = Routing(scoring="sigmoid", groups=4, top_groups=2, group_best=2, correction_X=CORRECTION)
    chosen, shares = route(logits, 3, normalized, routing)
    scores = logits[0].sigmoid()
    # Sums of pairs: 0.88 + 0.67, 0.5 + 0.67, 0.62 + 0.70, 0.05 + 0.95: the first and the third.
    assert chosen.tolist() == [[0, 5, 1]]
    expected = scores[chosen[0]] / (scores[chosen[0]].sum() if normalized else 1)
    torch.testing.assert_close(shares[0], expected)


@pytest.mark.parametrize(
    ("normalized", "routing", "activation"),
    every_pair([False, True], ROUTINGS, ["silu", "gelu_tanh", "swiglu_oai", LimitedSwiGLU(0.5), "relu2"]),
)
def test_is_what_plain_torch_gives(
    ops: Ops, normalized: bool, routing: Routing, activation: Activation | LimitedSwiGLU
) -> None:
    """With biases of experts and a shared expert."""
    gates = 48 if activation == "relu2" else 96
    weights = [torch.randn(8, gates, 72) / 72**0.5, torch.randn(8, 72, 48) / 48**0.5]
    biases = [torch.randn(8, gates), torch.randn(8, 72)]
    x, logits, shared, gate = torch.randn(9, 72), torch.randn(9, 8), torch.randn(9, 72), torch.randn(9, 1)

    def experts_of(ops: Ops) -> Tensor:
        linears = [
            [ops.pack_linear(w.clone(), b.clone()) for w, b in zip(ws, bs, strict=True)]
            for ws, bs in zip(weights, biases, strict=True)
        ]
        mixture = Mixture(*linears, 8, 3, normalized, routing, activation)
        alone = ops.experts(mixture, x, logits, shared).clone()
        return torch.stack((alone, ops.experts(mixture, x, logits, shared, gate)))

    torch.testing.assert_close(experts_of(ops), experts_of(REFERENCE), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "normalized", "shape"), every_pair([torch.float32, torch.bfloat16], [False, True], SHAPES)
)
def test_is_the_sum_of_its_linears(
    ops: Ops, dtype: torch.dtype, normalized: bool, shape: tuple[int, ...]
) -> None:
    rows, hidden, inner, count, chosen = shape
    mixture = mixture_of(ops, hidden, inner, count, chosen, dtype, normalized=normalized)
    x, logits = torch.randn(rows, hidden).to(dtype), torch.randn(rows, count)
    _, shares = route(logits, chosen, normalized)
    got = ops.experts(mixture, x, logits)
    expected = weigh(by_linears(ops, mixture, x, logits).float(), shares)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_choice_has_the_bits_of_the_linears(ops: Ops, dtype: torch.dtype) -> None:
    if not ops.row_invariant:
        pytest.skip("a row's bits hang on its neighbors in these kernels")
    mixture = mixture_of(ops, 100, 70, 6, 1, dtype)
    x, logits = torch.randn(50, 100).to(dtype), torch.randn(50, 6)
    assert torch.equal(ops.experts(mixture, x, logits), by_linears(ops, mixture, x, logits)[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(ops: Ops, dtype: torch.dtype) -> None:
    if not ops.row_invariant:
        pytest.skip("a row's bits hang on its neighbors in these kernels")
    mixture = mixture_of(ops, 130, 66, 8, 3, dtype)
    x, logits = torch.randn(300, 130).to(dtype), torch.randn(300, 8)
    logits[:, 2] += 3  # one expert that nearly all choose
    together = ops.experts(mixture, x, logits).clone()
    for rows in [1, 2, 5, 16, 17, 33, 200]:
        got = ops.experts(mixture, x[-rows:].clone(), logits[-rows:].clone())
        assert torch.equal(got, together[-rows:]), rows


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_broken_row_is_nan_and_alone(ops: Ops, poison: float) -> None:
    mixture = mixture_of(ops, 64, 32, 4, 2, torch.float32)
    x, logits = torch.randn(5, 64), torch.randn(5, 4)
    clean = ops.experts(mixture, x, logits).clone()
    logits[3, 1] = poison
    got = ops.experts(mixture, x, logits)
    assert got[3].isnan().all()
    torch.testing.assert_close(got[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


def test_equal_experts_are_taken_by_number(ops: Ops) -> None:
    mixture = mixture_of(ops, 64, 32, 4, 2, torch.float32)
    x = torch.randn(1, 64)
    low = ops.experts(mixture, x, torch.tensor([[0.0, 1.0, 1.0, 1.0]])).clone()
    expected = by_linears(ops, mixture, x, torch.tensor([[-1.0, 1.0, 1.0, 0.0]])).mean(1)
    torch.testing.assert_close(low, expected, atol=1e-5, rtol=1e-5)


def split(mixture: Mixture, held: range, load: Tensor | None = None) -> Mixture:
    gate_ups, downs = mixture.gate_ups[held.start : held.stop], mixture.downs[held.start : held.stop]
    return replace(mixture, gate_ups=gate_ups, downs=downs, held=held, load_X=load)


@pytest.mark.parametrize(
    ("dtype", "routing", "cuts"),
    every_pair(
        [torch.float32, torch.bfloat16],
        [Routing(), Routing(scoring="sigmoid", scales_inputs=True)],
        [(0, 4, 8), (0, 3, 6, 8), (0, 1, 8)],
    ),
)
def test_ranks_with_some_experts_whole_add_up(
    ops: Ops, dtype: torch.dtype, routing: Routing, cuts: tuple[int, ...]
) -> None:
    """The first has the shared expert too. One that holds none of what a row chose gives zeros."""
    mixture = replace(mixture_of(ops, 72, 40, 8, 3, dtype), routing=routing)
    x, logits, shared = torch.randn(37, 72).to(dtype), torch.randn(37, 8), torch.randn(37, 72).to(dtype)
    logits[5] = torch.arange(8.0, 0.0, -1.0)
    whole = ops.experts(mixture, x, logits, shared).float()
    parts = [split(mixture, range(*ends)) for ends in pairwise(cuts)]
    found = [
        ops.experts(part, x, logits, None if number else shared).clone() for number, part in enumerate(parts)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(torch.stack(found).float().sum(0), whole, atol=tolerance, rtol=tolerance)
    assert cuts[-2] < 3 or not found[-1][5].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_rank_with_some_experts_does_not_depend_on_the_others(
    ops: Ops, dtype: torch.dtype
) -> None:
    if not ops.row_invariant:
        pytest.skip("a row's bits hang on its neighbors in these kernels")
    mixture = split(mixture_of(ops, 130, 66, 8, 3, dtype), range(2, 5))
    x, logits = torch.randn(100, 130).to(dtype), torch.randn(100, 8)
    logits[50:70, 5:] += 20  # rows that choose nothing of what is here
    together = ops.experts(mixture, x, logits).clone()
    for rows in [1, 2, 33, 40, 60]:
        got = ops.experts(mixture, x[-rows:].clone(), logits[-rows:].clone())
        assert torch.equal(got, together[-rows:]), rows
    nothing = ops.experts(mixture, x[50:70].clone(), logits[50:70].clone())
    assert not nothing.any()


PLACEMENTS = [
    [[0]] * 8,
    [[0], [1], [0], [1], [0], [1], [0], [1]],
    [[0, 1], [1], [0], [0, 1], [1], [0], [1], [0, 1]],
    [[0, 1, 2]] * 8,
    [[2], [0, 2], [1], [0, 1, 2], [1], [2], [0], [0]],
]
"""Ranks that hold each of eight experts."""


def divide(mixture: Mixture, holders: list[list[int]], load: Tensor) -> list[Mixture]:
    """Return the mixture of each rank; all count into `load`."""
    ranks, parts = 1 + max(map(max, holders)), []
    for rank in range(ranks):
        held = [expert for expert, of_expert in enumerate(holders) if rank in of_expert]
        linears = [[each[expert] for expert in held] for each in (mixture.gate_ups, mixture.downs)]
        owners = ExpertOwners(holders, rank, ranks, load if rank == 0 else None)
        parts.append(replace(mixture, gate_ups=linears[0], downs=linears[1], held=held, owners=owners))
    return parts


@pytest.mark.parametrize(
    ("dtype", "routing", "holders", "rows"),
    every_pair(
        [torch.float32, torch.bfloat16],
        [Routing(), Routing(scoring="sigmoid", scales_inputs=True)],
        PLACEMENTS,
        [1, 37, 300],
    ),
)
def test_results_exchanged_between_ranks_have_the_bits_of_one(
    ops: Ops, dtype: torch.dtype, routing: Routing, holders: list[list[int]], rows: int
) -> None:
    """Wherever experts are, however many hold one; with a shared expert and without."""
    assert ops.expert_results is not None
    assert ops.combine_experts is not None
    mixture = replace(mixture_of(ops, 130, 66, 8, 3, dtype), routing=routing)
    x, logits = torch.randn(rows, 130).to(dtype), torch.randn(rows, 8)
    logits[:, 3] += 3  # one expert that nearly all choose
    shared, gate = torch.randn(rows, 130).to(dtype), torch.randn(rows, 1)
    load = torch.zeros(1 + max(map(max, holders)), dtype=torch.int64)
    whole = [ops.experts(mixture, x, logits).clone(), ops.experts(mixture, x, logits, shared, gate).clone()]
    found = []
    for part in divide(mixture, holders, load):
        results = ops.expert_results(part, x, logits)
        assert part.owners is not None
        mine = (results.owners_TK == part.owners.rank).repeat_interleave(130, 1)
        assert not results.rows_TKE[~mine].any()
        found.append(ExpertResults(*(each.clone() for each in results)))
    chosen, _ = route(logits, 3, True, routing)
    owners = found[0].owners_TK
    assert all(torch.equal(each.owners_TK, owners) for each in found), "ranks agree on who computes what"
    for expert, of_expert in enumerate(holders):
        assert set(owners[chosen == expert].tolist()) <= set(of_expert)
    assert load.tolist() == torch.bincount(owners.flatten(), minlength=len(load)).tolist()
    if rows == 300:
        assert set(owners[chosen == 3].tolist()) == set(holders[3]), "all of its holders have some rows"
    results = found[0]._replace(rows_TKE=torch.stack([each.rows_TKE for each in found]).sum(0))
    combined = [ops.combine_experts(results).clone(), ops.combine_experts(results, shared, gate)]
    if not ops.row_invariant:
        torch.testing.assert_close(combined, whole)
    else:
        assert all(map(torch.equal, combined, whole))


def test_a_shared_expert_alone_is_combined_with_no_results(ops: Ops) -> None:
    assert ops.combine_experts is not None
    shared, gate = torch.randn(5, 72), torch.randn(5, 1)
    torch.testing.assert_close(ops.combine_experts(None, shared, gate), shared * gate.sigmoid())


def test_few_rows_of_a_copied_expert_go_to_the_rank_with_least_to_do() -> None:
    """Their weights are read once, not on each of its ranks."""
    if not native_ready():
        pytest.skip("the C++ kernels do so")
    ops = load_backend("cpu").ops()
    assert ops.expert_results is not None
    mixture = mixture_of(ops, 64, 32, 4, 1, torch.float32)
    logits = torch.full((12, 4), -9.0)
    logits[:8, 0], logits[8:, 1] = 9.0, 9.0
    part, _ = divide(mixture, [[0], [0, 1], [0], [1]], torch.zeros(2, dtype=torch.int64))
    owners = ops.expert_results(part, torch.randn(12, 64), logits).owners_TK
    assert owners.flatten().tolist() == [0] * 8 + [1] * 4


def test_rows_of_each_expert_are_counted_whoever_holds_it(ops: Ops) -> None:
    load = torch.zeros(6, dtype=torch.int64)
    mixture = split(mixture_of(ops, 64, 32, 6, 2, torch.float32), range(3, 6), load)
    x, logits = torch.randn(11, 64), torch.randn(11, 6)
    for _ in range(2):
        ops.experts(mixture, x, logits)
    chosen, _ = route(logits, 2, True)
    assert load.tolist() == (2 * torch.bincount(chosen.flatten(), minlength=6)).tolist()
