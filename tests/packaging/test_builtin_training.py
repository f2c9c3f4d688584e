"""Training of the built-in model goes on where it left off, and asks more often for what has changed."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
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


def test_changed_topics_are_asked_for_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    import questions

    try:
        facts = questions.load_facts()
        ports = {
            often: answers_to_port(questions, facts, often)
            for often in (frozenset[str](), frozenset(["port"]))
        }
        # 10,000 draws of 212 topics, a fifth of them out of scope: some 37, 140 at four times the rate.
        assert 2 * ports[frozenset()] < ports[frozenset(["port"])] < 8 * ports[frozenset()]
        with pytest.raises(ValueError, match="no such topics: prot"):
            questions.Writer(facts, 1, set(), frozenset(["prot"]))
    finally:
        for name in ("questions", "wording"):
            sys.modules.pop(name, None)


def answers_to_port(questions: ModuleType, facts: object, often: frozenset[str]) -> int:
    writer = questions.Writer(facts, 1, set(), often)
    return sum(writer.pair()[1].startswith("The default port is") for _ in range(10_000))


def test_weights_are_averaged_by_their_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(RECIPE))
    import average
    import checkpoint

    try:
        artefact, run = tmp_path / "model.safetensors", tmp_path / "run.safetensors"
        save_file({"weight": torch.full((2, 3), 4.0), "bias": torch.ones(2)}, artefact)
        model, optimizer = new()
        step(model, optimizer, torch.ones(1, 3))
        checkpoint.save(run, model, optimizer, 1)
        got = average.average([(1.0, artefact), (3.0, run)])
        assert set(got) == {"weight", "bias"}
        assert torch.equal(got["weight"], (1 + 0.75 * model.weight.detach()).to(torch.bfloat16))
        assert torch.equal(got["bias"], (0.25 + 0.75 * model.bias.detach()).to(torch.bfloat16))
    finally:
        for name in ("average", "checkpoint"):
            sys.modules.pop(name, None)
