"""Recurrent layers: checks against the reference, work to time, and variants to compile."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from gpu.checks import LIMIT, Check, Checks, Setting, distance, name_of
from gpu.kernel_speed import Work
from llmbox.kernels.recurrent import ScanShape
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.backend import triton_ops
from support.recurrent_layers import Layer, fresh_state, layout_of

TINY = {
    "delta": ScanShape("delta", heads=2, key_heads=1, key_dim=12, value_dim=20, beta=2.0),
    "kda": ScanShape("kda", heads=1, key_heads=1, key_dim=12, value_dim=12),
    "ssm": ScanShape("ssm", heads=2, key_heads=1, key_dim=8, value_dim=12, limits=(0.01, 1.5)),
    "s6": ScanShape("s6", heads=2, key_heads=1, key_dim=8, value_dim=12),
}
SHAPES = {
    "delta": ScanShape("delta", heads=32, key_heads=16, key_dim=128, value_dim=128),  # Qwen3-Next
    "kda": ScanShape("kda", heads=32, key_heads=32, key_dim=128, value_dim=128),  # Kimi-Linear
    "ssm": ScanShape("ssm", heads=48, key_heads=1, key_dim=128, value_dim=64),  # Granite 4 tiny
    "s6": ScanShape("s6", heads=80, key_heads=1, key_dim=16, value_dim=64),  # Jamba Reasoning 3B
}
FALCON = ScanShape("ssm", heads=24, key_heads=1, key_dim=256, value_dim=64)
CHANNELS = 8192


def layer(kind: str, setting: Setting, dtype: torch.dtype) -> Layer:
    shapes, channels = (TINY, 52) if setting.tiny else (SHAPES, CHANNELS)
    return Layer(kind, dtype, shapes, channels, setting.seed, setting.device)


def checks(setting: Setting, dtype: torch.dtype) -> Checks:
    long = 17 if setting.tiny else 150
    spans = [(0, long), (0, 1), (0, 2)]
    after = [(each, each + 1) for _, each in spans]
    device = setting.device
    for kind in ("conv", "conv gated", *SHAPES):
        each = layer(kind, setting, dtype)
        steps = [
            layout_of(spans, [3, 0, 5], [{16: 1}, {}, {}], device),
            layout_of(after, [3, 0, 5], [{long + 1: 2}, {}, {}], device),
        ]
        ours, theirs = fresh_state(each), fresh_state(each)
        for layout, step in zip(steps, ("prompts", "decoding"), strict=True):
            rows, gates = each.rows(len(layout.positions_T))
            exact = each.apply(REFERENCE, rows, gates, theirs, layout)
            got = each.apply(triton_ops(device, dtype), rows, gates, ours, layout)
            yield Check(name_of("recurrent:", kind, dtype, step), distance(got, exact), LIMIT[dtype])
        written = [0, 1, 2, 3, 5]
        kept = (state.tensors[not each.is_conv][1, written] for state in (ours, theirs))
        yield Check(name_of("recurrent:", kind, dtype, "state"), distance(*kept), LIMIT[dtype])
        yield cuts(each, setting, dtype)


def cuts(each: Layer, setting: Setting, dtype: torch.dtype) -> Check:
    """With --deterministic: bits of a sequence at once against those of its rows in pieces."""
    ops, device = triton_ops(setting.device, dtype, deterministic=True), setting.device
    length = 4 if setting.tiny else 200
    rows, gates = each.rows(length)
    whole = each.apply(ops, rows, gates, fresh_state(each), layout_of([(0, length)], [2], device=device))
    state, found, start = fresh_state(each), [], 0
    for end in (1, length // 2, length):
        layout = layout_of([(start, end)], [2], device=device)
        found.append(each.apply(ops, rows[start:end], gates[start:end], state, layout))
        start = end
    unequal = not torch.equal(torch.cat(found), whole)
    return Check(name_of("one row, one result: recurrent", each.kind, dtype), float(unequal), 0.0)


def all_work(device: torch.device) -> Iterator[Callable[[], Work]]:
    for kind in ("conv", *SHAPES):
        for sequences, length in ((1, 1), (64, 1), (256, 1), (1, 2048), (1, 8192)):
            yield partial(work, kind, sequences, length, device)


def work(kind: str, sequences: int, length: int, device: torch.device) -> Work:
    """One layer over `sequences` of `length` tokens; decoding rows read and write a state each."""
    dtype, rows = torch.bfloat16, sequences * length
    each = Layer(kind, dtype, SHAPES, CHANNELS, 0, device)
    past = 0 if length > 1 else 9
    layout = layout_of([(past, past + length)] * sequences, range(sequences), device=device)
    sizes = replace(each.state_shape, num_slots=sequences)
    state, ops = fresh_state(each, sizes), triton_ops(device, dtype)
    inputs = [each.rows(rows) for _ in range(2)]
    states = state.tensors[not each.is_conv][1].nbytes * (2 if past else 1)
    moved = sum(x.nbytes for x in inputs[0]) * 1.5 + states
    calls = [partial(each.apply, ops, *x, state, layout) for x in inputs]
    shape = each.shape
    operations = 0.0 if each.is_conv else 6.0 * rows * shape.heads * shape.key_dim * shape.value_dim
    return Work(f"{kind}, {sequences} x {length}", moved, operations, "bf16", {"ours": calls})


def compile_layers(
    kinds: Sequence[str] = ("conv", "conv gated", *SHAPES, "wide"),
    dtype: torch.dtype = torch.bfloat16,
    *,
    deterministic: bool = False,
) -> None:
    """Prompts and decoding of the shapes that are timed, and of Falcon-H1's wide keys."""
    ops = triton_ops(torch.device("cpu"), dtype, deterministic=deterministic)
    shapes = {"conv": SHAPES["delta"], "conv gated": SHAPES["delta"], "wide": FALCON, **SHAPES}
    for kind, shape in (("ssm" if name == "wide" else name, shapes[name]) for name in kinds):
        each = Layer(kind, dtype, {kind: shape}, 256)
        state = fresh_state(each)
        for spans in ([(3, 4)] * 2, [(0, 70), (3, 4)]):
            layout = layout_of(spans, [1, 2], [{4: 3}, {}])
            each.apply(ops, *each.rows(len(layout.positions_T)), state, layout)


def compile_gates(dtype: torch.dtype = torch.bfloat16) -> None:
    ops = triton_ops(torch.device("cpu"), dtype).recurrent
    assert ops is not None
    x = torch.zeros(3, 32, 128, dtype=dtype)
    for norm_first in (True, False):
        ops.gated_norm(x, x, torch.zeros(32, 128), 1e-6, norm_first)
    flat = x.flatten(1)
    ops.sigmoid_mul(flat, flat)
    ops.silu_mul(flat, flat)
    for added in (None, flat):
        ops.mul_add(flat, torch.zeros(4096), added)
