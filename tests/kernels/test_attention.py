import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout, KVShape
from llmbox.kernels.ops import Ops
from llmbox.kernels.reference.kv_cache import quantize_dynamic
from support.lanes import every_pair
from support.numbers import DTYPES, assert_near
from support.paged import ragged_rows

BLOCK = 4
CPU = torch.device("cpu")


class Step:
    """Sequences with a past already in the cache and `new` tokens each, on scattered blocks."""

    def __init__(
        self,
        ops: Ops,
        sequences: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (4, 2),
        head_dim: int = 16,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        self.ops, self.sequences, self.dtype = ops, sequences, dtype
        self.kv_dtype = kv_dtype or dtype
        self.softcap = softcap
        self.sinks_H = torch.linspace(-3, 4, heads[0]) if sinks else None
        self.heads, self.head_dim = heads, head_dim
        rng = random.Random(seed)
        torch.manual_seed(seed)
        need = [-(-(past + new) // BLOCK) for past, new in sequences]
        blocks = rng.sample(range(sum(need) + 5), sum(need))
        self.tables = [[blocks.pop() for _ in range(n)] for n in need]
        shape = KVShape(
            num_layers=2,
            num_blocks=sum(need) + 5,
            block_size=BLOCK,
            num_kv_heads=heads[1],
            head_dim=head_dim,
            dtype=self.kv_dtype,
            compute_dtype=dtype,
        )
        self.cache = ops.make_kv_cache(shape, CPU)
        ops.clear_blocks(self.cache, list(range(shape.num_blocks)))
        self.k, self.v = (
            [torch.randn(past + new, heads[1], head_dim).to(dtype) for past, new in sequences] for _ in "kv"
        )
        self.q = [torch.randn(new, heads[0], head_dim).to(dtype) for _, new in sequences]

    def ragged(self, spans: Sequence[tuple[int, int]]) -> BatchLayout:
        """`spans` are (start, end) positions of each sequence."""
        return ragged_rows(self.tables, spans, BLOCK)

    def write(self, spans: Sequence[tuple[int, int]], layer: int = 1) -> None:
        plan = self.ops.plan_attention(self.ragged(spans), self.cache, None)
        k = torch.cat([k[start:end] for k, (start, end) in zip(self.k, spans, strict=True)])
        v = torch.cat([v[start:end] for v, (start, end) in zip(self.v, spans, strict=True)])
        self.ops.write_kv(self.cache, layer, k, v, plan)

    def run(self, window: int | None = None, layer: int = 1) -> Tensor:
        pasts = [(0, past) for past, _ in self.sequences]
        if any(end for _, end in pasts):
            self.write(pasts, layer)
        spans = [(past, past + new) for past, new in self.sequences]
        self.write(spans, layer)
        plan = self.ops.plan_attention(self.ragged(spans), self.cache, window)
        scale = self.head_dim**-0.5
        return self.ops.attention(
            torch.cat(self.q), self.cache, layer, plan, scale, self.softcap, self.sinks_H
        )

    def exact(self, window: int | None = None) -> Tensor:
        """Plain formula, in float64, on the numbers that the cache can hold."""
        group = self.heads[0] // self.heads[1]
        rows = []
        for (past, new), q_NHD, k, v in zip(self.sequences, self.q, self.k, self.v, strict=True):
            keys_SHD, values_SHD = (self.kept(x).repeat_interleave(group, 1) for x in (k, v))
            places_S, own_N1 = torch.arange(past + new), torch.arange(past, past + new).unsqueeze(1)
            seen_NS = places_S <= own_N1
            if window is not None:
                start_N1 = own_N1 // -window * -window if window < 0 else own_N1 - window + 1
                seen_NS &= places_S >= start_N1
            scores_HNS = torch.einsum("nhd,shd->hns", q_NHD.double(), keys_SHD) * self.head_dim**-0.5
            if self.softcap is not None:
                scores_HNS = self.softcap * (scores_HNS / self.softcap).tanh()
            scores_HNS = scores_HNS.masked_fill(~seen_NS, -torch.inf)
            if self.sinks_H is not None:
                sinks_HN1 = self.sinks_H.double().view(-1, 1, 1).expand(-1, new, -1)
                scores_HNS = torch.cat((scores_HNS, sinks_HN1), -1)
            shares_HNS = torch.softmax(scores_HNS, -1)[..., : past + new]
            rows.append(torch.einsum("hns,shd->nhd", shares_HNS, values_SHD))
        return torch.cat(rows).view(-1, self.heads[0] * self.head_dim)

    def kept(self, rows: Tensor) -> Tensor:
        if self.kv_dtype != torch.int8:
            return rows.double()
        codes, scales = quantize_dynamic(rows, torch.int8)
        return codes.double() * scales.unsqueeze(-1)


MIXED = [(9, 1), (0, 1), (30, 1), (31, 1), (0, 7), (5, 6), (16, 4), (3, 1), (0, 33)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 100, -1, -6, -16])
def test_mixed_rows(ops: Ops, dtype: torch.dtype, window: int | None) -> None:
    step = Step(ops, MIXED, dtype=dtype)
    assert_near(step.run(window), step.exact(window))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_keys_are_read_as_the_cache_holds_them(ops: Ops, kv_dtype: torch.dtype) -> None:
    assert ops.read_keys is not None
    dtype = kv_dtype if kv_dtype.is_floating_point else torch.float32
    step = Step(ops, [(0, 33), (9, 1)], dtype=dtype, kv_dtype=kv_dtype, heads=(2, 1), head_dim=22)
    step.run()
    for table, k_SGD in zip(step.tables, step.k, strict=True):
        places = torch.arange(len(k_SGD)).flip(0)
        slots = torch.tensor(table)[places // BLOCK] * BLOCK + places % BLOCK
        for dims in (slice(0, 22), slice(6, 22), slice(3, 9)):
            found = ops.read_keys(step.cache, 1, slots, dims)
            torch.testing.assert_close(found.double(), step.kept(k_SGD)[places, 0, dims], atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 5), (8, 1)])
@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 100, 512])
def test_head_shapes(ops: Ops, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    step = Step(ops, [(3, 1), (0, 9), (10, 5)], dtype=dtype, heads=heads, head_dim=head_dim)
    assert_near(step.run(), step.exact())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_capped_scores(ops: Ops, dtype: torch.dtype, window: int | None, softcap: float) -> None:
    step = Step(ops, MIXED, dtype=dtype, softcap=softcap)
    assert_near(step.run(window), step.exact(window))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.float32, None), (torch.bfloat16, None), (None, torch.int8)]
)
@pytest.mark.parametrize("options", [{"window": 5}, {"softcap": 1.5}, {"heads": (8, 1), "head_dim": 64}])
def test_sinks_take_a_share(
    ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype | None, options: dict[str, Any]
) -> None:
    options = dict(options)
    window = options.pop("window", None)
    for sequences in (MIXED, [(300, 1), (0, 140)]):
        step = Step(ops, sequences, dtype=dtype or torch.bfloat16, kv_dtype=kv_dtype, sinks=True, **options)
        tolerance = 2e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            step.run(window).double(), step.exact(window), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("window", [None, 130])
def test_capped_scores_of_many_chunks(ops: Ops, kv_dtype: torch.dtype, window: int | None) -> None:
    sequences = [(300, 1), (128, 1), (0, 140), (250, 20)]
    options = {"heads": (8, 2), "head_dim": 256, "kv_dtype": kv_dtype, "softcap": 1.5}
    step = Step(ops, sequences, dtype=torch.bfloat16, **options)
    torch.testing.assert_close(step.run(window).double(), step.exact(window), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "window"),
    every_pair([None, torch.int8], [torch.float32, torch.bfloat16], [None, 40, 130, -100, -128]),
)
def test_contexts_of_many_chunks(
    ops: Ops, dtype: torch.dtype, window: int | None, kv_dtype: torch.dtype | None
) -> None:
    """C++ kernels walk 64 or 128 tokens at a time."""
    sequences = [(300, 1), (128, 1), (0, 140), (250, 20)]
    step = Step(ops, sequences, dtype=dtype, kv_dtype=kv_dtype, heads=(3, 1), head_dim=64)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 5e-4
    got = step.run(window).double()
    torch.testing.assert_close(got, step.exact(window), atol=tolerance, rtol=tolerance)


def test_keys_may_be_kept_in_another_dtype(ops: Ops) -> None:
    step = Step(ops, MIXED, kv_dtype=torch.bfloat16)
    torch.testing.assert_close(step.run().double(), step.exact(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
def test_int8_loses_nothing_but_the_rounding_of_keys_and_values(
    ops: Ops, dtype: torch.dtype, window: int | None
) -> None:
    step = Step(ops, MIXED, dtype=dtype, kv_dtype=torch.int8)
    tolerance = {torch.float32: 5e-4, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(step.run(window).double(), step.exact(window), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [2, 10, 20, 64, 128])
def test_int8_head_shapes(ops: Ops, heads: tuple[int, int], head_dim: int) -> None:
    step = Step(ops, [(3, 1), (0, 9), (70, 5)], heads=heads, head_dim=head_dim, kv_dtype=torch.int8)
    torch.testing.assert_close(step.run().double(), step.exact(), atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_token_spoils_the_heads_that_see_it(ops: Ops, kv_dtype: torch.dtype, broken: float) -> None:
    step = Step(ops, [(9, 1), (9, 1), (9, 1)], kv_dtype=kv_dtype)
    clean = step.run().view(3, 2, -1)
    step.k[0][4, 0, 3], step.v[2][4, 1, 3] = broken, broken
    rows = step.run().view(3, 2, -1)  # a row's first half is of the query heads that read kv head 0
    assert not rows[0, 0].isfinite().all()
    assert not rows[2, 1].isfinite().all()
    for n, half in [(0, 1), (1, 0), (1, 1), (2, 0)]:
        assert torch.equal(rows[n, half], clean[n, half])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_decoding_row_does_not_depend_on_its_neighbors(ops: Ops, kv_dtype: torch.dtype) -> None:
    together = Step(ops, [(past, 1) for past in (9, 30, 31, 5, 63, 200)], kv_dtype=kv_dtype)
    rows = together.run()
    for n, (past, _) in enumerate(together.sequences):
        alone = Step(ops, [(past, 1)], kv_dtype=kv_dtype, seed=1)
        alone.q, alone.k, alone.v = [together.q[n]], [together.k[n]], [together.v[n]]
        assert torch.equal(alone.run(), rows[n : n + 1])


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(
    ops: Ops, kv_dtype: torch.dtype, softcap: float | None
) -> None:
    if not ops.row_invariant:
        pytest.skip("these kernels do not promise it")
    options = {"heads": (3, 1), "head_dim": 64, "kv_dtype": kv_dtype, "softcap": softcap, "sinks": True}
    step = Step(ops, [(0, 150)], dtype=torch.bfloat16, **options)
    prompt = step.run()
    for end in (1, 16, 17, 43, 128, 129, 150):
        plan = ops.plan_attention(step.ragged([(end - 1, end)]), step.cache, None)
        row = ops.attention(
            step.q[0][end - 1 : end], step.cache, 1, plan, step.head_dim**-0.5, softcap, step.sinks_H
        )
        assert torch.equal(row, prompt[end - 1 : end])


def test_a_large_mask_is_made_in_pieces(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["llmbox.kernels.reference.attention"], "MASK_LIMIT", 4 * 40 * 3)
    step = Step(ops, [(9, 31), (0, 40)])
    assert_near(step.run(17), step.exact(17))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_copied_blocks_carry_all_layers(ops: Ops, kv_dtype: torch.dtype) -> None:
    step = Step(ops, [(0, BLOCK), (0, BLOCK)], kv_dtype=kv_dtype)
    for layer in (0, 1):
        step.write([(0, BLOCK), (0, 0)], layer)
    source, destination = step.tables[0][0], step.tables[1][0]
    ops.copy_blocks(step.cache, [(source, destination)])
    step.k[1], step.v[1] = step.k[0], step.v[0]
    for layer in (0, 1):
        plan = ops.plan_attention(step.ragged([(BLOCK - 1, BLOCK)] * 2), step.cache, None)
        q = step.q[0][-1:].expand(2, -1, -1)
        first, second = ops.attention(q, step.cache, layer, plan, 0.25)
        assert torch.equal(first, second)
        assert first.abs().sum() > 0


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_what_an_earlier_owner_left_is_cleared(ops: Ops, kv_dtype: torch.dtype) -> None:
    step = Step(ops, [(0, 1), (0, 6), (5, 1)], kv_dtype=kv_dtype)
    clean = step.run()
    poison(step)
    partly_filled = [table[-1] for table in step.tables]
    ops.clear_blocks(step.cache, partly_filled)
    assert torch.equal(step.run(), clean)


def poison(step: Step) -> None:
    """Every slot of every block holds NaN."""
    k, v = step.k, step.v
    full = [(0, len(table) * BLOCK) for table in step.tables]
    step.k, step.v = (
        [torch.full((end, *x.shape[1:]), torch.nan) for x, (_, end) in zip(xs, full, strict=True)]
        for xs in (k, v)
    )
    for layer in (0, 1):
        step.write(full, layer)
    step.k, step.v = k, v
