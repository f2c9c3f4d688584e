"""Vision towers: checks against the reference, and the time that pictures take."""

import math
import time
from collections.abc import Iterator
from itertools import product
from zlib import crc32

import torch
from torch import Tensor

from gpu.checks import LIMIT, Check, Checks, Setting, distance, name_of
from gpu.report import Report
from llmbox.engine.ipc.messages import PreparedImage
from llmbox.engine.model_config.vision.config import (
    ImageProcessorConfig,
    PositionTable,
    TowerConfig,
    TowerNames,
    VisionConfig,
    VisionRope,
)
from llmbox.engine.vision.encoder import VisionEncoder
from llmbox.engine.vision.layers import TowerWeights
from llmbox.engine.weights.source import WeightRequest
from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.triton.backend import triton_ops

SIDES = (512, 1024, 2048)
"""Pixels of the pictures that are timed."""
KINDS: tuple[tuple[PositionTable, VisionRope, int], ...] = (("bilinear", "axial", 0), ("buckets", "", 2))
"""Learned positions, RoPE, and the side of attention windows."""


class RandomWeights:
    """Stands for a checkpoint: numbers that follow from their names, rounded to one dtype for all."""

    def __init__(self, ops: Ops, dtype: torch.dtype, rounded: torch.dtype, device: torch.device) -> None:
        self.ops, self.dtype, self.device, self._rounded = ops, dtype, device, rounded

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        found = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return found.to(self._rounded).to(self.device).float()

    def vector(self, name: str, size: int) -> Tensor:
        return (self.floats(name, (size,)) * size**0.5 * 0.2 + ("norm" in name)).to(self.dtype)

    def packed(self, asked: WeightRequest) -> PackedLinear:
        parts = [self.floats(name, (rows.size, asked.inputs.size)) for name, rows in asked.outputs.items()]
        bias = torch.cat([self.vector(f"{name} b", rows.size) for name, rows in asked.outputs.items()])
        return self.ops.pack_router(torch.cat(parts).to(self.dtype), bias if asked.bias else None)


def vision(kind: tuple[PositionTable, VisionRope, int], *, tiny: bool, layers: int = 2) -> VisionConfig:
    """A tower of Qwen3-VL's size, with a merger and a deepstack level."""
    table, rope, windows = kind
    hidden, inner, heads = (48, 80, 2) if tiny else (1152, 4304, 16)
    names = TowerNames(
        patch="patch", layers="layers", table="table", qkv=("qkv",), projector=("norm", "fc1", "fc2")
    )
    tower = TowerConfig(
        names=names,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        stored_layers=layers,
        num_heads=heads,
        head_dim=hidden // heads,
        patch_size=4 if tiny else 16,
        frames=2,
        activation="gelu_tanh",
        table=table,
        table_rows=48 * 48,
        rope=rope,
        windows=windows,
        full_layers=(0,),
        merge=2,
        projector="merger",
        projector_size=4 * hidden,
        projector_bias=True,
        deepstack=(0,),
    )
    rules = ImageProcessorConfig(kind="square", unit=32, mean=(0.5,) * 3, std=(0.5,) * 3, resample=3)
    return VisionConfig(
        family="random",
        image_token_id=0,
        placeholder="",
        image_text="",
        hidden_size=64 if tiny else 4096,
        tower=tower,
        processor=rules,
    )


def encoder(
    ops: Ops, config: VisionConfig, dtype: torch.dtype, rounded: torch.dtype, device: torch.device
) -> VisionEncoder:
    return VisionEncoder(config, TowerWeights(RandomWeights(ops, dtype, rounded, device)))


def picture(height: int, width: int) -> PreparedImage:
    pixels = bytes((7 * place + place // 91) % 256 for place in range(3 * height * width))
    return PreparedImage(content_hash=b"", tiles=[(height, width)], pixels=pixels)


def slices(tower: VisionEncoder, image: PreparedImage) -> Iterator[Tensor | None]:
    """Yield None after each slice but the last, then the embeddings."""
    steps = tower.encode(image)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            yield end.value
            return
        yield None


def checks(setting: Setting, dtype: torch.dtype) -> Checks:
    """Several layers are further from exact than one kernel."""
    unit = 8 if setting.tiny else 32
    for kind, (rows, columns) in product(KINDS, [(2, 1)] if setting.tiny else [(1, 1), (30, 41)]):
        config, image = vision(kind, tiny=setting.tiny), picture(rows * unit, columns * unit)
        ours = encoder(triton_ops(setting.device, dtype), config, dtype, dtype, setting.device)
        exact = encoder(REFERENCE, config, torch.float32, dtype, setting.device)
        *_, found = slices(ours, image)
        *_, wanted = slices(exact, image)
        assert found is not None
        assert wanted is not None
        name = name_of("picture:", dtype, *kind[:2], f"{rows} x {columns} embeddings")
        yield Check(name, distance(found, wanted), 3 * LIMIT[dtype])


def report_times(report: Report, device: torch.device, layers: int = 27) -> None:
    """Time a tower of 27 layers: each slice is waited for, so that the longest is known."""
    report.section("Pictures: a tower of Qwen3-VL 8B's size, random weights")
    report.table("picture", "ms", "note")
    dtype = torch.bfloat16
    config = vision(KINDS[0], tiny=False, layers=layers)
    tower = encoder(triton_ops(device, dtype), config, dtype, dtype, device)
    for place, side in enumerate(SIDES):
        if report.left < 5:
            report.skipped([f"{side} x {side}" for side in SIDES[place:]])
            return
        image = picture(side, side)
        for _ in slices(tower, image):  # kernels are compiled
            pass
        whole, longest, before = time.perf_counter(), 0.0, time.perf_counter()
        for _ in slices(tower, image):
            torch.cuda.synchronize()
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        took, patches = time.perf_counter() - whole, (side // config.tower.patch_size) ** 2
        work = layers * operations(config.tower, patches)
        note = f"{patches:,} patches, {work / took / 1e12:.0f} TFLOP/s, longest slice {longest * 1e3:.1f} ms"
        report.row((f"{side} x {side}", f"{took * 1e3:.1f}", note))


def operations(tower: TowerConfig, patches: int) -> float:
    """Return the operations of a layer."""
    linears = 4 * tower.hidden_size**2 + 2 * tower.hidden_size * tower.intermediate_size
    return 2.0 * patches * linears + 4.0 * math.pow(patches, 2) * tower.hidden_size
