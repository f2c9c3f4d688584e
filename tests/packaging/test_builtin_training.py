"""Training of the built-in model goes on where a checkpoint left it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

RECIPE = Path(__file__).parents[2] / "packaging" / "builtin_model"


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    model(rows).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def new() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_paused_run_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    import checkpoint

    try:
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))
        through, optimizer = new()
        for _ in range(3):
            step(through, optimizer, rows)
        checkpoint.save(tmp_path / "run.safetensors", through, optimizer, 3)
        step(through, optimizer, rows)

        resumed, optimizer = new()
        assert checkpoint.restore(tmp_path / "run.safetensors", resumed, optimizer) == 3
        step(resumed, optimizer, rows)
        assert torch.equal(resumed.weight, through.weight)
        assert torch.equal(resumed.bias, through.bias)
        assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]
    finally:
        sys.modules.pop("checkpoint", None)
