"""Averages weights: `average.py OUT SHARE FILE [SHARE FILE]...`, of artefacts and of checkpoints of one run.

Weights that a run passed through, and those it began with, err in different questions: their mean in fewer.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def main() -> None:
    out, *rest = sys.argv[1:]
    parts = [(float(share), Path(file)) for share, file in zip(rest[::2], rest[1::2], strict=True)]
    Path(out).unlink(missing_ok=True)
    save_file(average(parts), out, metadata={"format": "pt"})
    # safetensors writes for the owner alone, but an installed package is read by everybody.
    Path(out).chmod(0o644)


def average(parts: list[tuple[float, Path]]) -> dict[str, Tensor]:
    """In bfloat16. Shares are relative to their sum. Optimiser state of checkpoints is left out."""
    whole = sum(share for share, _ in parts)
    sums: dict[str, Tensor] = {}
    for share, file in parts:
        for name, weight in _weights(file).items():
            sums[name] = sums.get(name, torch.zeros_like(weight)) + share / whole * weight
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in sums.items()}


def _weights(file: Path) -> dict[str, Tensor]:
    """In float32. A checkpoint's names have `model.` in front, and its optimiser's are left out."""
    tensors = load_file(file)
    if any(name.startswith("adam.") for name in tensors):
        tensors = {name.removeprefix("model."): w for name, w in tensors.items() if name.startswith("model.")}
    return {name: weight.float() for name, weight in tensors.items() if name != "lm_head.weight"}


if __name__ == "__main__":
    main()
