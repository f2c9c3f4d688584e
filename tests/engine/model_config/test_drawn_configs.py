"""Configs that are drawn, beside transformers: the same logits, or a refusal; never other logits."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbox.engine.errors import ModelError
from support.drawn_configs import DRAWN, draw_changes, make_drawn, prompt_of
from support.real_engines import all_logits, decode_logits, hf_model, load, runner_of

DRAWS = 12
"""Configs of each family, each night others."""
DECODED = 8
ATOL = 1e-3
"""Ten times that of `test_differential.py`: some draws make rounding visible. Mistakes are larger."""


@torch.inference_mode()
def logits_of_transformers(model: Path, arch: str, changes: dict[str, Any], is_old: bool) -> Tensor | None:
    """Write the model; its logits, or None if transformers cannot have these values together."""
    try:
        make_drawn(model, arch, changes, is_old=is_old)
        ids = prompt_of(json.loads((model / "config.json").read_text()))
        logits = hf_model(model)(torch.tensor([ids])).logits[0]
    except Exception:  # noqa: BLE001 - its checks are many, and of every type
        return None
    return logits if logits.isfinite().all() else None


@torch.inference_mode()
def check_logits(model: Path, expected: Tensor) -> None:
    """Raises ModelError if the engine refuses the model."""
    runner = runner_of(load(model))
    ids = prompt_of(json.loads((model / "config.json").read_text()))
    torch.testing.assert_close(all_logits(runner, ids), expected, atol=ATOL, rtol=ATOL)
    decoded = decode_logits(runner, ids, len(ids) - DECODED)
    torch.testing.assert_close(decoded, expected[-len(decoded) :], atol=ATOL, rtol=ATOL)


def try_draw(model: Path, arch: str, changes: dict[str, Any], is_old: bool) -> str:
    """Return "equal", "impossible" (for transformers) or the refusal."""
    expected = logits_of_transformers(model, arch, changes, is_old)
    if expected is None:
        return "impossible"
    try:
        check_logits(model, expected)
    except ModelError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{arch} with {changes}, {is_old=}") from error
    return "equal"


@pytest.mark.nightly
@pytest.mark.parametrize("arch", DRAWN)
def test_drawn_values_give_the_logits_of_transformers(tmp_path: Path, arch: str) -> None:
    rng, found = random.Random(), list[str]()
    for number in range(DRAWS):
        changes, is_old = draw_changes(rng, arch), rng.random() < 0.4
        found.append(try_draw(tmp_path / str(number), arch, changes, is_old))
    assert "equal" in found, found
