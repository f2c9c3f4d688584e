"""Language parts of vision-language models beside transformers, with the tower in the same files."""

from pathlib import Path

import pytest
import torch

from support.real_engines import all_logits, ask, hf_tokens, load, runner_of, tokens
from support.vision_models import make_vision_model

PROMPT = ask("a", [3, 200, 17, 5, *range(40, 70), 9, 300], 8)


@pytest.mark.parametrize("kind", ["idefics3", "lfm2_vl", "lfm3_vl", "glm_ocr"])
def test_texts_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs = make_vision_model(tmp_path, kind)
    with torch.inference_mode():
        exact = theirs(torch.tensor([PROMPT.prompt_ids])).logits[0]
    found = all_logits(runner_of(load(tmp_path)), PROMPT.prompt_ids)
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)
    assert tokens(load(tmp_path), [PROMPT])["a"] == hf_tokens(theirs, PROMPT.prompt_ids, 8)
