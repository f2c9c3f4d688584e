"""What `compile.py` compiles. Every group has the kernels of one kind; `few` are those of a test."""

from collections.abc import Callable, Iterator
from functools import partial

from gpu import adapters
from gpu.recurrent import compile_gates, compile_layers
from gpu.variants import (
    BF16,
    F16,
    F32,
    FFN,
    FP8,
    HIDDEN,
    I8,
    advance,
    attention,
    experts,
    gemma_rows,
    given_rows,
    heads_apart,
    latents,
    linears,
    made_wide,
    portable,
    rows,
    sampling,
    sums_and_norms,
    texts,
    whole_linears,
    zeros,
)
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.triton.linear.linear import FP8_BLOCKS, FP8_ROWS
from llmbox.kernels.triton.linear.quantize_activations import RowFormat

Group = tuple[str, Callable[[], None]]


def once(_: tuple[int, int]) -> Iterator[Group]:
    """Every kernel, for Hopper, in one variant or two: those that take the most registers among them."""
    yield "attention", attention
    yield "attention", partial(attention, FP8, blocks=(128,))
    yield "attention", partial(attention, heads=(8, 4), head_dim=256, softcap=50.0)
    yield "attention", partial(attention, heads=(8, 4), head_dim=256, window=1024, spans=True)
    yield "latents", latents
    yield "texts", texts
    yield "rows", partial(rows, "fp8")
    yield "rows", gemma_rows
    yield "linears", partial(linears, "int8", (1, 600))
    for quant in ("int4", "fp8", "w8a8"):
        yield "linears", partial(linears, quant, (1, 300))
    yield "linears", partial(linears, "int4-g128", (1,))
    for quant in (None, "w8a8"):
        yield "experts", partial(experts, quant)
    yield "sampling", sampling
    yield "advance", advance
    yield "adapters", adapters.compile_all
    yield "recurrent", partial(compile_layers, ("conv", "kda", "ssm"))
    yield "recurrent", compile_gates
    yield "portable", portable


def few(capability: tuple[int, int]) -> Iterator[Group]:
    """Beside `once` for Hopper, the variants that matter most; what differs elsewhere."""
    if capability[0] == 9:
        yield from once(capability)
        yield "attention", partial(attention, deterministic=True)
        yield "attention", partial(attention, FP8)
        yield from left_by_attention()
        for quant in (None, "w8a8", "fp8-block"):
            yield "rows", partial(rows, quant)
        yield "attention", partial(attention, heads=(64, 8), head_dim=64, window=128, sinks=True)
        yield "attention", partial(attention, heads=(8, 1), head_dim=512, blocks=(128,))
        yield "rows", given_rows
        yield "rows", partial(heads_apart, 128)
        yield "linears", partial(linears, "int8", (100, 200))
        yield "linears", partial(linears, "int4", (20, 200))
        yield "linears", partial(linears, "fp8-block", (1, 300))
        yield "linears", partial(linears, None, (3,), deterministic=True)
        for quant in ("int4", "fp8", "fp8-block"):
            yield "experts", partial(experts, quant)
        yield "recurrent", compile_layers
        return
    yield "linears", partial(linears, "int4", (20, 200))
    yield "recurrent", compile_layers
    yield "adapters", adapters.compile_all
    if capability < (8, 9):
        yield "attention", partial(attention, I8)
        for heads, head_dim in (((32, 8), 128), ((8, 4), 256)):
            sizes = {"heads": heads, "head_dim": head_dim, "blocks": (128,)}
            yield "attention", partial(attention, I8, deterministic=True, **sizes)
        yield "rows", partial(rows, "w8a8")
        yield "linears", partial(linears, "w8a8", (1, 300))
    else:
        yield "attention", partial(attention, FP8)
        yield "linears", partial(linears, "fp8-block", (1, 300))


def left_by_attention() -> Iterator[Group]:
    for row_format in (FP8_BLOCKS, FP8_ROWS._replace(given=zeros(1, dtype=F32))):
        yield "attention", partial(attention, leaves=row_format)


def every(capability: tuple[int, int]) -> Iterator[Group]:
    fp8 = capability >= (8, 9)
    yield from attentions(fp8)
    if fp8:
        yield from left_by_attention()
    for fixed in (False, True):
        for head_dim in (128, 256):
            leaves = RowFormat(I8, 128)
            name = f"attention {head_dim}, int8 rows{', fixed' * fixed}"
            yield name, partial(attention, head_dim=head_dim, leaves=leaves, deterministic=fixed)
    made_here = {name: quant for name, quant in QUANTS.items() if not quant.in_checkpoints_only}
    quants = [name for name, quant in made_here.items() if fp8 or not quant.is_float]
    for quant in quants:
        yield f"linears {quant}", partial(linears, quant, (1, 17, 33, 129, 513))
        yield f"linears {quant}, whole", partial(whole_linears, quant, (1, 17, 33, 129))
        yield f"linears {quant}, fixed", partial(linears, quant, (3,), deterministic=True)
        yield f"linears {quant}, 200 inputs", partial(linears, quant, (1, 33, 129), inputs=200)
        for dtype in (F16, F32):
            yield f"linears {quant} {dtype}", partial(linears, quant, (1, 129), dtype=dtype)
        for fixed in (False, True):
            yield f"experts {quant}{', fixed' * fixed}", partial(experts, quant, deterministic=fixed)
        if not QUANTS[quant].is_float:
            yield f"made wide {quant}", partial(made_wide, quant)
    for dtype in (BF16, F16, F32):
        yield f"linears, fixed {dtype}", partial(linears, None, (3,), dtype=dtype, deterministic=True)
        yield f"experts {dtype}", partial(experts, None, dtype)
        yield f"sampling {dtype}", partial(sampling, dtype)
        yield f"adapters {dtype}", partial(adapters.compile_all, dtype)
        yield f"heads apart {dtype}", partial(heads_apart, 80, dtype)
        for fixed in (False, True):
            name = f"recurrent {dtype}{', fixed' * fixed}"
            yield name, partial(compile_layers, dtype=dtype, deterministic=fixed)
        yield f"gates of recurrent layers {dtype}", partial(compile_gates, dtype)
    yield "sampling, 32000", partial(sampling, BF16, 32000)
    yield "advance", advance
    for quant in (None, *quants):
        for hidden, ffn in ((1024, 3072), (HIDDEN, FFN), (5120, 25600), (8192, 28672)):
            yield f"rows {quant} {hidden} {ffn}", partial(rows, quant, hidden=hidden, ffn=ffn)
    yield "rows of Gemma", gemma_rows
    for fixed in (False, True):
        sizes = {"heads": (64, 8), "head_dim": 64, "window": 128, "sinks": True}
        yield f"attention with sinks{', fixed' * fixed}", partial(attention, deterministic=fixed, **sizes)
    if fp8:
        yield "rows of given scales", given_rows
    for dtype in (F16, F32):
        yield f"rows {dtype}", partial(rows, "w8a8", dtype=dtype)
    for ranks in (2, 4, 8):
        for hidden in (HIDDEN, 8192):
            yield f"sum and norm {ranks} {hidden}", partial(sums_and_norms, ranks, hidden)


def attentions(fp8: bool) -> Iterator[Group]:
    for kv_dtype in (None, I8, *([FP8] if fp8 else [])):
        for window in (None, 1000):
            for fixed in (False, True):
                name = f"attention KV {kv_dtype} window {window}{', fixed' * fixed}"
                options = {"window": window, "deterministic": fixed, "blocks": (4, 30, 128)}
                yield name, partial(attention, kv_dtype, **options)
    for window in (None, 1024):
        for fixed in (False, True):
            options = {"heads": (8, 4), "head_dim": 256, "window": window, "deterministic": fixed}
            name = f"attention of pictures, window {window}{', fixed' * fixed}"
            yield name, partial(attention, spans=True, **options)
    for dtype in (BF16, F16, F32):
        for head_dim in (64, 72, 80, 128, 256):
            yield f"texts {head_dim} {dtype}", partial(texts, head_dim, dtype)
    for fixed in (False, True):
        options = {"heads": (40, 8), "window": -8192, "deterministic": fixed}
        yield f"attention within chunks{', fixed' * fixed}", partial(attention, **options)
        for kv_dtype in (None, I8):
            options = {"heads": (8, 1), "head_dim": 512, "deterministic": fixed}
            yield f"attention 512 KV {kv_dtype}{', fixed' * fixed}", partial(attention, kv_dtype, **options)
    for kv_dtype in (None, I8, *([FP8] if fp8 else [])):
        for fixed in (False, True):
            for heads in (16, 20, 128):
                name = f"latents, {heads} heads, KV {kv_dtype}{', fixed' * fixed}"
                yield name, partial(latents, kv_dtype, heads=heads, deterministic=fixed)
    for heads, head_dim in (((14, 2), 64), ((32, 32), 80), ((16, 16), 96), ((16, 2), 128), ((8, 4), 256)):
        for kv_dtype in (None, I8):
            for fixed in (False, True):
                name = f"attention {heads} x {head_dim} KV {kv_dtype}{', fixed' * fixed}"
                yield name, partial(attention, kv_dtype, heads=heads, head_dim=head_dim, deterministic=fixed)
    for kv_dtype in (None, I8, *([FP8] if fp8 else [])):
        for fixed in (False, True):
            options = {"heads": (8, 4), "head_dim": 256, "softcap": 50.0, "deterministic": fixed}
            yield (
                f"attention, capped, KV {kv_dtype}{', fixed' * fixed}",
                partial(attention, kv_dtype, **options),
            )
    for dtype in (F16, F32):
        for kv_dtype in (None, I8):
            yield f"attention {dtype} KV {kv_dtype}", partial(attention, kv_dtype, dtype=dtype)
