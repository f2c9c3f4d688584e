"""Variants that follow the sequence length are fixed to the served context; there they equal transformers."""

from pathlib import Path

import pytest
import torch

from llmbox.engine.model import rotary
from llmbox.engine.model.rotary import attention_scale, inverse_frequencies
from llmbox.engine.model_config.config import parse_config
from llmbox.kernels.dispatch import load_backend
from support.tiny_models import ORIGINAL_CONTEXT, ROPE_VARIANTS, tiny_config, write_json

SCALED = [name for name in ROPE_VARIANTS if name != "default"]


@pytest.mark.parametrize("rope", SCALED)
@pytest.mark.parametrize("context", [ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 1, 64])
def test_frequencies_equal_transformers_at_the_served_context(
    tmp_path: Path, rope: str, context: int
) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    write_json(tmp_path / "config.json", tiny_config("llama", rope))
    hf = AutoConfig.from_pretrained(tmp_path)
    exact, scale = ROPE_INIT_FUNCTIONS[rope](hf, torch.device("cpu"), seq_len=context)
    config = parse_config(tmp_path)
    torch.testing.assert_close(inverse_frequencies(config, config.rope, context), exact)
    assert attention_scale(config.rope) == pytest.approx(scale)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_factor": 1.3},
        {"mscale": 0.8, "mscale_all_dim": 0.6},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
        {"factor": 1.0},
    ],
)
def test_knobs_of_yarn(tmp_path: Path, changes: dict[str, float]) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {**ROPE_VARIANTS["yarn"], **changes}
    write_json(tmp_path / "config.json", tiny_config("llama", rope_scaling=scaling))
    exact, scale = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(tmp_path), torch.device("cpu"))
    config = parse_config(tmp_path)
    torch.testing.assert_close(inverse_frequencies(config, config.rope, 64), exact)
    assert attention_scale(config.rope) == pytest.approx(scale)


@pytest.mark.parametrize("rope", [*ROPE_VARIANTS])
def test_kept_rows_are_the_same_bits(tmp_path: Path, rope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary, "KNOWN", 3 * rotary.KNOWN_AT_ONCE + 8)
    write_json(tmp_path / "config.json", tiny_config("llama", rope))
    turn = load_backend("cpu").cos_sin
    made = rotary.Rotary(parse_config(tmp_path), 4096, torch.device("cpu"), turn)
    for positions in ([0], [70, 3, 64, 70], [3 * rotary.KNOWN_AT_ONCE + 7], [5, 1000]):
        at_T = torch.tensor(positions, dtype=torch.int32)
        for is_long in {False, bool(made.short_context)}:
            for _ in range(2):  # computed, then kept
                kept = made.decoding_rows(at_T, positions, is_long=is_long)
                for mine, theirs in zip(kept, made.rows(at_T, is_long), strict=True):
                    assert mine.is_contiguous()
                    assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
