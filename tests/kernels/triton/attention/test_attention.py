from dataclasses import replace

import pytest
import torch

from llmbox.kernels.dispatch import UnknownBackend, sdpa_from
from llmbox.kernels.op_types import BatchLayout, WindowLayout
from llmbox.kernels.ops import Ops
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.attention import attention
from llmbox.kernels.triton.attention import attention_metadata as attention_plan
from llmbox.kernels.triton.attention.attention_combine import FEW_SPLITS
from llmbox.kernels.triton.backend import triton_ops
from support.lanes import nightly
from support.numbers import assert_near
from support.paged import CPU, PagedStep, ragged_rows

OPS = triton_ops(CPU, torch.float32)
FIXED = triton_ops(CPU, torch.float32, deterministic=True)
MIXED = [(18, 1), (0, 1), (0, 17), (16, 5), (3, 1)]


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "window"),
    [
        ((4, 2), 64, torch.float32, None),
        ((8, 1), 128, torch.float16, None),
        ((5, 5), 80, torch.float32, None),
        ((6, 2), 96, torch.float16, 7),
        ((2, 1), 256, torch.float32, 1),
    ],
)
def test_mixed_rows(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, window: int | None) -> None:
    step = PagedStep(MIXED, heads=heads, head_dim=head_dim, dtype=dtype)
    assert_near(step.attend(OPS, window), step.exact(window))


@pytest.mark.parametrize("ops", [OPS, FIXED, REFERENCE], ids=["ops", "fixed", "reference"])
@pytest.mark.parametrize("window", [None, 9])
def test_rows_of_pictures_see_each_other(
    monkeypatch: pytest.MonkeyPatch, ops: Ops, window: int | None
) -> None:
    """Pictures of several tiles, beside decoding rows and texts."""
    monkeypatch.setattr(attention_plan, "FIXED_SPLIT", 32)
    sequences = [(18, 1), (3, 1), (0, 17), (4, 40), (2, 3), (30, 7)]
    step = PagedStep(sequences, heads=(2, 1), spans=[0, 1, 0, 1, 2, 2])
    assert_near(step.attend(ops, window), step.exact(window))


@pytest.mark.parametrize("ops", [OPS, FIXED])
def test_attention_within_chunks(monkeypatch: pytest.MonkeyPatch, ops: Ops) -> None:
    """Rows before and behind the border of a chunk, in one tile; a context of several pieces."""
    monkeypatch.setattr(attention_plan, "LEAST_SPLIT", 32)
    monkeypatch.setattr(attention_plan, "FIXED_SPLIT", 32)
    step = PagedStep([(79, 1), (80, 1), (37, 9)], heads=(2, 1))
    assert_near(step.attend(ops, -40), step.exact(-40))


@pytest.mark.parametrize(
    ("heads", "latent", "dtype", "kv_dtype"),
    [(20, 64, torch.float32, None), (16, 32, torch.float16, None), (4, 32, torch.float32, torch.int8)],
)
def test_latents(
    monkeypatch: pytest.MonkeyPatch, heads: int, latent: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Keys of which a part is the value, and more heads than a tile has rows; split and whole."""
    monkeypatch.setattr(attention_plan, "LEAST_SPLIT", 32)
    monkeypatch.setattr(attention_plan, "FIXED_SPLIT", 32)
    sizes = {"heads": (heads, 1), "head_dim": latent + 8, "latent": latent, "dtype": dtype}
    step = PagedStep([(70, 1), (1, 1), (14, 4)], kv_dtype=kv_dtype, **sizes)
    for fixed in (False, True):
        found = step.attend(triton_ops(CPU, dtype, deterministic=fixed))
        if kv_dtype is None:
            assert_near(found, step.exact())
        assert (found.double() - step.exact()).norm() / step.exact().norm() < 0.01


def test_heads_of_512() -> None:
    step = PagedStep([(18, 1), (0, 3)], heads=(2, 1), head_dim=512, dtype=torch.float16)
    assert_near(step.attend(OPS, 7), step.exact(7))


@pytest.mark.parametrize(("head_dim", "dtype"), [(256, torch.float32), (64, torch.float16)])
@pytest.mark.parametrize("window", [None, 7])
def test_capped_scores(head_dim: int, dtype: torch.dtype, window: int | None) -> None:
    step = PagedStep(MIXED, heads=(4, 2), head_dim=head_dim, dtype=dtype, softcap=1.5)
    exact = step.exact(window)
    assert_near(step.attend(OPS, window), exact)
    assert_near(step.attend(FIXED, window), exact)


def test_torch_knows_no_caps() -> None:
    """So prompts that it would attend stay with our kernel."""
    step = PagedStep([(0, 40)], softcap=1.5)
    assert_near(step.attend(triton_ops(CPU, torch.float32, sdpa_from=32)), step.exact())


@pytest.mark.parametrize("ops", [OPS, FIXED])
def test_sinks_take_a_share(monkeypatch: pytest.MonkeyPatch, ops: Ops) -> None:
    """Of one program's sums, and of those that several bring together; not in PyTorch's kernels."""
    monkeypatch.setattr(attention_plan, "LEAST_SPLIT", 32)
    monkeypatch.setattr(attention_plan, "FIXED_SPLIT", 32)
    step = PagedStep([(70, 1), (1, 1), (0, 9)], heads=(4, 2), sinks=True)
    for window in (None, 40):
        assert_near(step.attend(ops, window), step.exact(window))
    if ops is OPS:
        assert_near(step.attend(triton_ops(CPU, torch.float32, sdpa_from=8)), step.exact())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_eight_bit_keys_and_values(dtype: torch.dtype, softcap: float | None) -> None:
    step = PagedStep([(18, 1), (0, 5)], heads=(4, 1), kv_dtype=dtype, softcap=softcap)
    error = (step.attend(OPS).double() - step.exact()).norm() / step.exact().norm()
    assert error < (0.01 if dtype == torch.int8 else 0.05)


@pytest.mark.parametrize("latent", [0, 32])
@pytest.mark.parametrize("fixed", [False, True])
def test_float16_holds_what_bfloat16_rows_and_scales_have(
    monkeypatch: pytest.MonkeyPatch, latent: int, fixed: bool
) -> None:
    """Products with E4M3 are in float16: queries beyond its range, values of 1e-7 to 1e3, of 0."""
    monkeypatch.setattr(attention_plan, "LEAST_SPLIT", 32)
    monkeypatch.setattr(attention_plan, "FIXED_SPLIT", 32)
    sizes = {"head_dim": 32 + 8, "latent": 32, "heads": (4, 1)} if latent else {"heads": (4, 2)}
    step = PagedStep([(150, 1), (1, 1), (40, 9)], kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, **sizes)
    step.q, step.k = [1e6 * q for q in step.q], [1e-6 * k for k in step.k]
    step.v = [k[..., :latent] for k in step.k] if latent else step.v
    if not latent:
        step.v[0] *= torch.logspace(-7, 3, 151).flip(0)[:, None, None]
        step.v[0][::5] = 0.0
        step.v[2] *= 1e-8
    step.q[1][:] = 0.0
    exact = step.exact()
    found = step.attend(triton_ops(CPU, torch.bfloat16, deterministic=fixed)).double()
    for rows in ([0], [1], range(2, 11)):
        assert (found[rows] - exact[rows]).norm() / exact[rows].norm() < 0.05


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("longest", [150, nightly(400)])
def test_long_contexts_are_split(monkeypatch: pytest.MonkeyPatch, window: int | None, longest: int) -> None:
    """Into few pieces and many: other programs bring them together."""
    monkeypatch.setattr(attention_plan, "LEAST_SPLIT", 32)
    step = PagedStep([(longest, 1), (1, 1), (64, 1)], heads=(4, 1))
    plan = OPS.plan_attention(step.ragged([(longest, longest + 1), (1, 2), (64, 65)]), None, window)
    splits = attention_plan.num_splits(plan, 1, CPU)
    assert 2 < splits <= FEW_SPLITS if longest == 150 else splits > FEW_SPLITS
    assert_near(step.attend(OPS, window), step.exact(window))


@pytest.mark.parametrize(("window", "latent"), [(None, 0), (20, 0), (None, 32)])
def test_one_row_one_result(monkeypatch: pytest.MonkeyPatch, window: int | None, latent: int) -> None:
    """Alone or in a prompt, split or walked by one program: the same bits."""
    monkeypatch.setattr(attention_plan, "FIXED_SPLIT", 32)
    sizes = {"heads": (20, 1), "head_dim": 40, "latent": 32} if latent else {"heads": (2, 1)}
    prompt = PagedStep([(0, 75)], **sizes)
    whole = prompt.attend(FIXED, window)
    assert_near(whole, prompt.exact(window))
    for position in (31, 32, 74):
        alone = PagedStep([(position, 1), (5, 1)], seed=1, **sizes)
        alone.q[0] = prompt.q[0][position : position + 1]
        alone.k[0], alone.v[0] = (x[: position + 1] for x in (prompt.k[0], prompt.v[0]))
        assert torch.equal(alone.attend(FIXED, window)[0], whole[position])


@pytest.mark.parametrize("ops", [OPS, REFERENCE])
def test_sliding_layers_with_blocks_of_their_own(ops: Ops) -> None:
    """Blocks behind the window are somebody else's, and are not read."""
    step = PagedStep([(300, 1), (290, 5)], heads=(2, 1))
    own = [[0] * 5 + table[5:] for table in step.tables]
    cache = ops.make_kv_cache(replace(step.shape(), is_windowed=True), CPU)
    ops.clear_blocks(cache, list(range(step.num_blocks)))
    spans = [(past, past + new) for past, new in step.sequences]
    step.write(ops, cache, [(0, end) for _, end in spans], 1)
    ragged = ragged_rows(own, spans, 16)
    window = WindowLayout(ragged.block_tables_NB, ragged.slots_T)
    others = replace(ragged, block_tables_NB=0 * ragged.block_tables_NB, slots_T=ragged.slots_T - 1)
    plan = ops.plan_attention(replace(others, window=window), cache, 100)
    ops.write_kv(
        cache,
        1,
        *(
            torch.cat([x[-new:] for x, (_, new) in zip(xs, step.sequences, strict=True)])
            for xs in (step.k, step.v)
        ),
        plan,
    )
    out = ops.attention(torch.cat(step.q), cache, 1, plan, step.head_dim**-0.5)
    assert_near(out, step.exact(100))


def test_free_rows_give_zeros_and_write_nothing() -> None:
    step = PagedStep([(4, 1), (7, 1)])
    cache = OPS.make_kv_cache(step.shape(), CPU)
    ragged = step.ragged([(4, 5), (7, 8)])
    free = replace(
        ragged,
        slots_T=torch.tensor([-1, int(ragged.slots_T[1])], dtype=torch.int32),
        context_lens_N=torch.tensor([0, 8], dtype=torch.int32),
    )
    step.write(OPS, cache, [(0, 4), (0, 7)], 1)
    plan = OPS.plan_attention(free, cache, None)
    before = cache.k.clone()
    OPS.write_kv(cache, 1, torch.cat([k[-1:] for k in step.k]), torch.cat([v[-1:] for v in step.v]), plan)
    changed = (cache.k != before).nonzero()[:, 1].unique()  # NaN is never equal: all unwritten blocks too
    assert set(step.tables[0]).isdisjoint({int(b) for b in changed if not before[1, b, 0, 4].isnan().any()})
    out = OPS.attention(torch.cat(step.q), cache, 1, plan, step.head_dim**-0.5)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert_near(out[1:], step.exact()[1:])


def test_the_grid_follows_from_shapes_alone() -> None:
    step = PagedStep([(18, 1), (0, 21)])
    plan = OPS.plan_attention(step.ragged([(18, 19), (0, 21)]), None, None)
    assert (plan.decoding, plan.longest) == (1, 32)
    assert isinstance(plan.ragged, BatchLayout)


def test_copied_blocks_carry_scales_too() -> None:
    step = PagedStep([(0, 16), (0, 16)], kv_dtype=torch.int8)
    cache = OPS.make_kv_cache(step.shape(), CPU)
    step.write(OPS, cache, [(0, 16), (0, 0)], 1)
    source, destination = step.tables[0][0], step.tables[1][0]
    OPS.copy_blocks(cache, [(source, destination)])
    for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        assert torch.equal(tensor[1, source], tensor[1, destination])
    assert cache.k_scale[1, destination].isfinite().all()


@pytest.mark.parametrize(
    ("sequences", "heads"), [([(0, 40)], (5, 5)), ([(18, 1), (3, 1), (0, 33), (20, 32)], (4, 2))]
)
def test_long_prompts_through_torch_give_the_same(
    monkeypatch: pytest.MonkeyPatch, sequences: list[tuple[int, int]], heads: tuple[int, int]
) -> None:
    """Whole prompts, later chunks and decoding rows beside them; the memory of other slots is poisoned."""
    step = PagedStep(sequences, heads=heads)
    ours = step.attend(OPS)
    monkeypatch.setattr(attention, "prefill", None)  # not called
    gathered = step.attend(triton_ops(CPU, torch.float32, sdpa_from=32))
    assert_near(gathered, step.exact())
    assert_near(gathered, ours.double())


def test_who_goes_through_torch() -> None:
    """No short prompt, no window, no 8-bit keys, nobody with --deterministic, and by default nobody."""

    def goes(
        sequences: list[tuple[int, int]],
        *,
        least: int | None = 32,
        window: int | None = None,
        kv_dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
    ) -> bool:
        step = PagedStep(sequences, kv_dtype=kv_dtype)
        ops = triton_ops(CPU, torch.float32, deterministic=deterministic, sdpa_from=least)
        spans = [(past, past + new) for past, new in sequences]
        plan = ops.plan_attention(step.ragged(spans), ops.make_kv_cache(step.shape(), CPU), window)
        return bool(plan.sdpa)

    assert goes([(5, 1), (0, 32)])
    assert not goes([(0, 32)], least=None)
    assert not goes([(0, 31)])
    assert not goes([(0, 64), (0, 2)])
    assert not goes([(5, 1), (9, 1)])
    assert not goes([(0, 64)], window=100)
    assert not goes([(0, 64)], kv_dtype=torch.int8)
    assert not goes([(0, 64)], deterministic=True)


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, given in (("", None), ("4096", 4096), ("0", 2)):
        monkeypatch.setenv("LLMBOX_SDPA_FROM", asked)
        assert sdpa_from() == given
    monkeypatch.setenv("LLMBOX_SDPA_FROM", "long")
    with pytest.raises(UnknownBackend, match="LLMBOX_SDPA_FROM=long: not a number"):
        sdpa_from()
