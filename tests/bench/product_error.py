"""How far products of rounded weights are off: |(W - Q) x| / |W x|, over the x of a text or random ones."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bench.ggml import Wide
from support.real_engines import hf_model

LAYER = {
    "q_proj": (2048, 1024),
    "k_proj": (1024, 1024),
    "v_proj": (1024, 1024),
    "o_proj": (1024, 2048),
    "gate_proj": (3072, 1024),
    "up_proj": (3072, 1024),
    "down_proj": (1024, 3072),
}
"""Of Qwen3-0.6B."""


def errors(linears: Mapping[str, tuple[Tensor, Wide, Tensor | None]]) -> float:
    """Each weight, rounded, and the mean of x xᵀ (None: x of independent inputs), to one relative error.

    The root of the mean square over linears, each of which counts the same.
    """
    shares = [
        squares(weight - rounded.weight_OI, moment) / squares(weight, moment)
        for weight, rounded, moment in linears.values()
    ]
    return (sum(shares) / len(shares)) ** 0.5


def squares(weight_OI: Tensor, moment_II: Tensor | None) -> float:
    """The mean of |W x|²."""
    wide = weight_OI.double()
    return float((wide * (wide if moment_II is None else wide @ moment_II)).sum())


def random_linears() -> Iterator[tuple[str, Tensor]]:
    """Of one layer, the same each time."""
    generator = torch.Generator().manual_seed(0)
    for name, shape in LAYER.items():
        yield name, torch.randn(shape, generator=generator) * 0.02


@torch.inference_mode()
def activations(model: Path, sequences: list[list[int]], weights: list[str]) -> dict[str, Tensor]:
    """By the name of each weight, the mean of x xᵀ over the text, [I, I] float64."""
    reference = hf_model(model)
    moments: dict[str, Tensor] = {}

    def watch(name: str) -> None:
        def add(_module: object, inputs: tuple[Tensor, ...]) -> None:
            x_TI = inputs[0].flatten(0, 1).double()
            moments[name] = moments.get(name, 0) + x_TI.T @ x_TI

        reference.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(add)

    for name in weights:
        watch(name)
    for ids in sequences:
        reference(torch.tensor([ids]))
    return moments
