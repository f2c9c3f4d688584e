"""Every kernel against exact results: on a GPU in all dtypes, on a CPU in Triton's interpreter."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from gpu import adapters, fp8_products, pictures, recurrent, sampling
from gpu.checks import LIMIT, Check, Checks, Group, Setting, distance, name_of
from gpu.variants import row_format_at_load
from llmbox.kernels.activation import XIELU, Activation
from llmbox.kernels.op_types import Mixture
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.sampling_types import DecodeInputs, DecodeRows
from llmbox.kernels.triton.backend import triton_ops
from llmbox.kernels.triton.elementwise import gate_rows, norm_rows
from llmbox.kernels.triton.linear.fused_moe import experts_product
from llmbox.kernels.triton.linear.linear import (
    DenseLinear,
    Fp8BlockLinear,
    Fp8Linear,
    W8A8Linear,
    WeightOnlyIntLinear,
    dequantize,
)
from llmbox.kernels.triton.linear.quantize_activations import Rows8, quantize_rows
from llmbox.kernels.triton.linear.tile_config import has_fp8
from llmbox.kernels.triton.linear.weight_packing import pack_grouped
from llmbox.kernels.weight_packing import to_numbers
from support.fake_quantized import stored_nibbles
from support.paged import PagedStep
from support.poison import poisoned_memory

FP8 = torch.float8_e4m3fn
SHAPES = [((32, 8), 128), ((14, 2), 64), ((5, 1), 80), ((8, 8), 96)]
"""Query and kv heads, head dim."""
NEAR = 0.01
"""||got - other|| / ||other|| of rows in 8 bits: a few codes may be the next ones."""


def all_checks(setting: Setting) -> Iterator[Group]:
    """In groups, each for one dtype, so that a caller may stop between two."""
    groups = (
        attention,
        families,
        texts,
        long_prompts,
        invariance,
        heads,
        rows,
        fused_rows,
        made_wide,
        linears,
        fp8_products.checks,
        experts,
        experts_of_ranks,
        adapters.checks,
        adapters.checks_of_experts,
        recurrent.checks,
        pictures.checks,
        sampling.drawn,
        sampling.ruled,
        advance,
    )

    for dtype in setting.dtypes:
        for group in groups:
            yield Group(name_of(title(group), dtype), partial(run, group, setting, dtype))


def run(group: Callable[[Setting, torch.dtype], Checks], setting: Setting, dtype: torch.dtype) -> Checks:
    torch.manual_seed(setting.seed)
    with poisoned_memory():
        yield from group(setting, dtype)


def title(group: Callable[..., Checks]) -> str:
    """Its function's name, and its module's where that is not this one."""
    module = "" if group.__module__ == __name__ else group.__module__.rpartition(".")[2]
    return f"{module} {group.__name__.removeprefix('checks')}".replace("_", " ").strip().replace("  ", " ")


def made_at_load(setting: Setting) -> list[Quant]:
    """Formats that weights are rounded to here; those that only checkpoints have are in `fp8_products.py`."""
    formats = (quant for quant in QUANTS.values() if not quant.in_checkpoints_only)
    return [quant for quant in formats if has_fp8(setting.device) or not quant.is_float]


def attention_cases(setting: Setting, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """(heads, head dim, KV dtype, window, deterministic): all of it in one shape, little in the others,
    as every one compiles kernels of its own."""
    first, *others = [((4, 2), 64)] if setting.tiny else SHAPES
    eight = [torch.int8] + [FP8] * (has_fp8(setting.device) and not setting.tiny)
    thorough = dtype == torch.bfloat16
    for kv_dtype in (dtype, *eight) if thorough else (dtype, torch.int8):
        for window in (None, 100) if thorough else (None,):
            yield from ((*first, kv_dtype, window, fixed) for fixed in (False, True))
    for shape in others if thorough else others[:1]:
        yield *shape, dtype, 100, False


def attention(setting: Setting, dtype: torch.dtype) -> Checks:
    device = setting.device
    sequences = [(18, 1), (0, 9)] if setting.tiny else [(1000, 1), (0, 1), (37, 1), (0, 300), (513, 77)]
    for heads, head_dim, kv_dtype, window, deterministic in attention_cases(setting, dtype):
        step = PagedStep(
            sequences,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            seed=setting.seed,
        )
        limit = LIMIT[dtype] + {torch.int8: 0.012, FP8: 0.05}.get(kv_dtype, 0.0)
        ops = triton_ops(device, dtype, deterministic=deterministic)
        error = distance(step.attend(ops, window), step.exact(window))
        name = name_of("attention", dtype, heads, head_dim, "KV", kv_dtype)
        yield Check(f"{name}, window {window}{', fixed' * deterministic}", error, limit)


def families(setting: Setting, dtype: torch.dtype) -> Checks:
    """Attention as some families have it: sinks, chunks, wide heads, latents and the linears of each head."""
    sequences = [(18, 1), (9, 5)] if setting.tiny else [(1000, 1), (0, 1), (37, 1), (0, 300), (513, 77)]
    cases: tuple[tuple[str, int | None, dict[str, Any]], ...] = (
        ("sinks", 7 if setting.tiny else 128, {"heads": (64, 8), "head_dim": 64, "sinks": True}),
        ("chunks", -9 if setting.tiny else -256, {"heads": (40, 8), "head_dim": 128}),
        ("heads of 512", None, {"heads": (8, 1), "head_dim": 512}),
        ("latents", None, {"heads": (128, 1), "head_dim": 576, "latent": 512}),
        (
            "pictures",
            7 if setting.tiny else 100,
            {"heads": (8, 4), "head_dim": 256, "spans": (0, 1, 0, 2, 1)},
        ),
        ("pictures", None, {"heads": (8, 4), "head_dim": 256, "spans": (0, 1, 0, 1, 2)}),
    )
    for name, window, options in cases:
        sizes = options
        if setting.tiny:
            latent = {"latent": 48} if "latent" in options else {}
            spans = {"spans": (0, 1)} if "spans" in options else {}
            sizes = options | {"heads": (2, 1), "head_dim": min(64, options["head_dim"])} | latent | spans
        step = PagedStep(sequences, dtype=dtype, device=setting.device, seed=setting.seed, **sizes)
        for deterministic in (False,) if setting.tiny else (False, True):
            ops = triton_ops(setting.device, dtype, deterministic=deterministic)
            error = distance(step.attend(ops, window), step.exact(window))
            fixed = ", fixed" * deterministic
            yield Check(f"{name_of('attention', dtype)}, {name}{fixed}", error, LIMIT[dtype])
    ops, heads = triton_ops(setting.device, dtype), 2 if setting.tiny else 128
    x, weights = setting.randn(9, heads, 96, dtype=dtype), setting.randn(heads, 40, 96, dtype=dtype)
    exact = torch.einsum("thi,hoi->tho", x.double(), weights.double())
    stack = ops.stack_heads([ops.pack_router(weight, None) for weight in weights])
    yield Check(
        name_of("linears by head", dtype), distance(ops.linear_by_head(stack, x), exact), LIMIT[dtype]
    )


def texts(setting: Setting, dtype: torch.dtype) -> Checks:
    """Attention of encoders, in both directions, against float64."""
    lens = [1, 9, 17] if setting.tiny else [1, 500, 33, 128, 8]
    q, k, v = (setting.randn(sum(lens), 4 if setting.tiny else 12, 64, dtype=dtype) for _ in "qkv")
    starts = torch.tensor([0, *lens], device=setting.device).cumsum(0).int()
    ops = triton_ops(setting.device, dtype)
    assert ops.attend_texts is not None
    for reach in (None, 8):
        exact = []
        for text in zip(*(torch.split(x.double(), lens) for x in (q, k, v)), strict=True):
            scores = torch.einsum("qhd,khd->hqk", *text[:2]) / 8
            place = torch.arange(len(text[0]), device=setting.device)
            far = (place - place.unsqueeze(1)).abs() > (len(place) if reach is None else reach)
            weights = scores.masked_fill(far, -torch.inf).softmax(-1)
            exact.append(torch.einsum("hqk,khd->qhd", weights, text[2]).flatten(1))
        found = ops.attend_texts(q, k, v, starts, 0.125, reach)
        yield Check(name_of("texts", dtype, reach), distance(found, torch.cat(exact)), LIMIT[dtype])


def long_prompts(setting: Setting, dtype: torch.dtype) -> Checks:
    """Through PyTorch's attention on gathered pages, decoding rows beside them."""
    sequences = [(18, 1), (0, 9), (7, 6)] if setting.tiny else [(1000, 1), (0, 300), (513, 77)]
    step = PagedStep(sequences, heads=(8, 2), dtype=dtype, device=setting.device, seed=setting.seed)
    ops = triton_ops(setting.device, dtype, sdpa_from=5)
    yield Check(name_of("long prompts, SDPA", dtype), distance(step.attend(ops), step.exact()), LIMIT[dtype])


def invariance(setting: Setting, dtype: torch.dtype) -> Checks:
    """With --deterministic: bits of a decoding row against those of the same row in a prompt."""
    ops = triton_ops(setting.device, dtype, deterministic=True)
    length = 20 if setting.tiny else 2500
    prompt = PagedStep([(0, length)], heads=(4, 1), dtype=dtype, device=setting.device, seed=setting.seed)
    whole = prompt.attend(ops)
    unequal = 0
    places = (0, length // 2, length - 1)
    for position in places:
        alone = PagedStep([(position, 1), (5, 1)], heads=(4, 1), dtype=dtype, device=setting.device)
        alone.q[0] = prompt.q[0][position : position + 1]
        alone.k[0], alone.v[0] = prompt.k[0][: position + 1], prompt.v[0][: position + 1]
        unequal += not torch.equal(alone.attend(ops)[0], whole[position])
    yield Check(name_of("one row, one result: attention", dtype), unequal / len(places), 0.0)
    names = [quant.name for quant in made_at_load(setting)]
    for quant in (None, "int4") if setting.tiny else (None, *names):
        ops = triton_ops(setting.device, dtype, QUANTS.get(quant or ""), deterministic=True)
        x = setting.randn(20 if setting.tiny else 1500, 256, dtype=dtype)
        packed = ops.pack_linear(setting.randn(48, 256, dtype=dtype), None)
        together = ops.linear(packed, x)
        alike = all(torch.equal(ops.linear(packed, x[:n].clone()), together[:n]) for n in (1, 17))
        yield Check(name_of("one row, one result: linear", dtype, quant or "plain"), float(not alike), 0.0)


def heads(setting: Setting, dtype: torch.dtype) -> Checks:
    step = PagedStep([(5, 1), (0, 3)], heads=(8, 2), head_dim=128, dtype=dtype, device=setting.device)
    ops = triton_ops(setting.device, dtype)
    qkv, norm = setting.randn(4, 12, 128, dtype=dtype), setting.randn(10, 128, dtype=dtype)
    angle = setting.randn(4, 64) * 3
    cos, sin = torch.cat((angle.cos(),) * 2, 1), torch.cat((-angle.sin(), angle.sin()), 1)
    cache = ops.make_kv_cache(step.shape(), setting.device)
    ragged = step.ragged([(5, 6), (0, 3)])
    q = ops.rotate_and_write(qkv, norm, 1e-6, cos, sin, cache, 1, ops.plan_attention(ragged, cache, None))
    exact = REFERENCE.rotary(REFERENCE.rms_norm(qkv[:, :10].float(), norm.float(), 1e-6), cos, sin)
    block, offset = ragged.slots_T.long() // 16, ragged.slots_T.long() % 16
    limit = LIMIT[dtype]
    yield Check(name_of("rotated queries", dtype), distance(q, exact[:, :8]), limit)
    yield Check(name_of("written keys", dtype), distance(cache.k[1, block, :, offset], exact[:, 8:]), limit)
    yield Check(name_of("written values", dtype), distance(cache.v[1, block, :, offset], qkv[:, 10:]), 0.0)
    apart = ops.rotary(ops.rms_norm(qkv[:, :10], norm, 1e-6), cos, sin)
    yield Check(name_of("heads normed, then rotated", dtype), distance(apart, exact), limit)
    source, blocks = int(block[0]), cache.k.shape[1]
    target = (source + 1) % blocks
    ops.copy_blocks(cache, [(source, target)])
    both = (x.view(torch.uint8) for x in (cache.k, cache.v))
    same = all(torch.equal(x[:, source], x[:, target]) for x in both)
    yield Check(name_of("copied blocks", dtype), float(not same), 0.0)


def rows(setting: Setting, dtype: torch.dtype) -> Checks:
    ops, limit = triton_ops(setting.device, dtype), LIMIT[dtype]
    width = 200 if setting.tiny else 4096
    x, residual, weight = (setting.randn(*s, dtype=dtype) for s in ((5, width), (5, width), (width,)))
    exact = REFERENCE.rms_norm(x.double(), weight.double(), 1e-6)
    yield Check(name_of("rms_norm", dtype), distance(ops.rms_norm(x, weight, 1e-6), exact), limit)
    total = residual + x
    got = ops.add_rms_norm(x, residual, weight, 1e-6)
    exact = REFERENCE.rms_norm(total.double(), weight.double(), 1e-6)
    yield Check(name_of("add_rms_norm", dtype), distance(got, exact), limit)
    yield Check(name_of("residual", dtype), distance(residual, total), 0.0)
    gates = setting.randn(5, 2 * width, dtype=dtype)
    for name in get_args(Activation):
        activation = XIELU(0.8, 1.3, 0.5, -1e-6) if name == "xielu" else name
        exact = REFERENCE.gate_mul(gates.double(), activation)
        yield Check(name_of(name, dtype), distance(ops.gate_mul(gates, activation), exact), limit)
    exact = 30 * (gates.double() / 3).tanh()
    yield Check(name_of("softcap", dtype), distance(ops.softcap(10 * gates, 30.0), exact), limit)


def fused_rows(setting: Setting, dtype: torch.dtype) -> Checks:
    """Bits of the 8-bit rows that norms and gates leave against those of a pass of their own.

    Two kernels are compared, which the compiler may contract or lay out differently: bits that differ are
    told, and numbers that do are failures.
    """
    for row_format in filter(None, map(row_format_at_load, made_at_load(setting))):
        for width in (200,) if setting.tiny else (1000, 4096, 12288):
            x, residual, weight = (setting.randn(*s, dtype=dtype) for s in ((5, width), (5, width), (width,)))
            normed, left = norm_rows(x, residual.clone(), weight, 1e-6, row_format)
            plain, _ = norm_rows(x, residual, weight, 1e-6, None)
            gated, also_left = gate_rows(torch.cat((x, residual), 1), "silu", row_format)
            name = name_of(dtype, row_format.dtype, row_format.group, "width", width)
            yield alike(f"norm beside rows in 8 bits {name}", normed, plain, LIMIT[dtype])
            for what, rows8, wide in (("norm", left, normed), ("gate", also_left, gated)):
                assert rows8 is not None
                apart = quantize_rows(wide, row_format)
                parts = zip(rows8, apart, strict=True)
                yield alike(
                    f"rows left in 8 bits by the {what} {name}",
                    widened(rows8),
                    widened(apart),
                    NEAR,
                    unequal=sum(unequal_numbers(*pair) for pair in parts),
                )


def alike(name: str, got: Tensor, other: Tensor, limit: float, unequal: int | None = None) -> Check:
    """Near enough; how many numbers differ in their bits is a note."""
    count = unequal_numbers(got, other) if unequal is None else unequal
    note = f"differs in the bits of {count} numbers" if count else ""
    return Check(name, distance(got, other), limit, note)


def unequal_numbers(got: Tensor, other: Tensor) -> int:
    size = got.element_size()
    bits = [each.contiguous().view(torch.uint8).view(-1, size) for each in (got, other)]
    return int((bits[0] != bits[1]).any(1).sum())


def widened(rows8: Rows8) -> Tensor:
    """What they stand for."""
    inputs, groups = rows8.numbers.shape[1], rows8.scales.shape[1]
    group = 128 if groups > 1 else inputs
    return rows8.numbers.float() * rows8.scales.repeat_interleave(group, 1)[:, :inputs]


def wide_weights(packed: object) -> Tensor:
    match packed:
        case DenseLinear(weight_OI, _):
            return weight_OI.float()
        case WeightOnlyIntLinear(weight, _) | W8A8Linear(weight, _):
            return dequantize(weight, torch.float32)
        case Fp8Linear(weight_OI, scales, _):
            return weight_OI.float() * scales
        case Fp8BlockLinear(weight_OI, scales, _):
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            return weight_OI.float() * spread[: weight_OI.shape[0], : weight_OI.shape[1]]
    raise TypeError(packed)


def made_wide(setting: Setting, dtype: torch.dtype) -> Checks:
    """Bit by bit by the words of the format: see `stored_nibbles`."""
    outputs, inputs = (37, 150) if setting.tiny else (1037, 2000)
    rounded_here = [quant for quant in QUANTS.values() if not quant.in_checkpoints_only]
    for quant in (quant for quant in rounded_here if quant.kind == "integer"):
        packed = pack_grouped(setting.randn(outputs, inputs), quant)
        codes = packed.weight
        if packed.bits == 4:
            codes = stored_nibbles(codes).to(torch.int8) - 8
        if packed.steps is not None:
            cells = (codes + 8).flatten(0, 1), packed.steps.flatten(0, 1)
            codes = to_numbers(*cells, quant).view(codes.shape)
        wide = (codes.float() * packed.scales.float().unsqueeze(-1)).transpose(0, 1).flatten(1)[:, :inputs]
        unequal = not torch.equal(dequantize(packed, dtype), wide.to(dtype))
        yield Check(name_of("made wide", dtype, quant.name), float(unequal), 0.0)


def linears(setting: Setting, dtype: torch.dtype) -> Checks:
    inputs, outputs = (160, 48) if setting.tiny else (2048, 1536)
    for quant in made_at_load(setting):
        ops = triton_ops(setting.device, dtype, quant)
        weight = setting.randn(outputs, inputs, dtype=dtype) / inputs**0.5
        bias = setting.randn(outputs, dtype=dtype)
        packed = ops.pack_linear(weight, bias)
        wide = wide_weights(packed).double()
        ids = torch.arange(outputs, device=setting.device)
        table = ops.pack_embedding(weight, True)
        error = distance(ops.embedding(table, ids), wide_weights(table))
        yield Check(name_of("embedding", dtype, quant.name), error, LIMIT[dtype])
        for count in (3,) if setting.tiny else (1, 17, 130, 500, 600):
            x = setting.randn(count, inputs, dtype=dtype)
            exact = x.double() @ wide.T + bias.double()
            error = distance(ops.linear(packed, x), exact)
            yield Check(
                name_of("linear", dtype, quant.name, count), error, LIMIT[dtype] + limit_of_rows(quant)
            )


def limit_of_rows(quant: Quant | None) -> float:
    """What rounding the rows of a product adds."""
    return {"rows": 0.015, "float": 0.04, "blocks": 0.04}.get(quant.kind if quant else "", 0.0)


def experts(setting: Setting, dtype: torch.dtype) -> Checks:
    """In every format, of experts with no rows, few and many."""
    inputs, outputs, sizes = (96, 128, (3, 0, 5)) if setting.tiny else (512, 768, (3, 0, 170, 1, 64, 500))
    x = setting.randn(sum(sizes), inputs, dtype=dtype)
    weight = setting.randn(len(sizes) * outputs, inputs, dtype=dtype) / inputs**0.5
    ends = torch.tensor(sizes).cumsum(0).tolist()
    starts = torch.tensor([0, *ends], dtype=torch.int32, device=setting.device)
    for quant in (None, *made_at_load(setting)):
        ops = triton_ops(setting.device, dtype, quant)
        assert ops.pack_experts is not None
        packed = ops.pack_experts(weight, None)
        wide = wide_weights(packed).double().view(len(sizes), outputs, inputs)
        exact = [
            x[end - size : end].double() @ each.T for each, end, size in zip(wide, ends, sizes, strict=True)
        ]
        for fixed in (False, True):
            error = distance(experts_product(x, packed, starts, fixed=fixed), torch.cat(exact))
            name = name_of("experts", dtype, quant.name if quant else "plain") + ", fixed" * fixed
            yield Check(name, error, LIMIT[dtype] + limit_of_rows(quant))


def experts_of_ranks(setting: Setting, dtype: torch.dtype) -> Checks:
    """Results of ranks that have some experts whole add up to those of one that has all."""
    hidden, inner, rows = (64, 32, 5) if setting.tiny else (512, 256, 300)
    x, logits = setting.randn(rows, hidden, dtype=dtype), setting.randn(rows, 8, dtype=torch.float32)
    gate_ups = setting.randn(8, 2 * inner, hidden, dtype=dtype) / hidden**0.5
    downs = setting.randn(8, hidden, inner, dtype=dtype) / inner**0.5
    ops = triton_ops(setting.device, dtype, None)
    assert ops.pack_experts is not None
    results = []
    for held in (range(8), range(3), range(3, 8)):
        here = slice(held.start, held.stop)
        linears = [[ops.pack_experts(each[here].flatten(0, 1), None)] for each in (gate_ups, downs)]
        results.append(ops.experts(Mixture(*linears, 8, 2, True, held=held), x, logits))
    whole, *parts = results
    error = distance(torch.stack(parts).double().sum(0), whole.double())
    yield Check(name_of("experts of ranks", dtype), error, 2 * LIMIT[dtype])


def advance(setting: Setting, dtype: torch.dtype) -> Checks:
    if dtype != setting.dtypes[0]:
        return
    device = setting.device

    def int32(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    state = DecodeRows(
        torch.tensor([7, 8, 9], device=device),
        int32(16, 0, 33),
        int32(*range(9)).view(3, 3),
    )
    inputs = DecodeInputs(*(torch.empty(3, dtype=torch.int32, device=device) for _ in range(3)))
    ops: Ops = triton_ops(device, dtype)
    ops.prepare_decode_inputs(state, torch.tensor([70, 80, 90], device=device), inputs, 16)
    got = torch.cat((state.ids_R.int(), state.lengths_R, inputs.positions_R, inputs.slots_R)).tolist()
    want = [70, 8, 90, 17, 0, 34, 16, 0, 33, 1 * 16, -1, 8 * 16 + 1]
    yield Check("advance", 0.0 if got == want else math.inf, 0.0)
