"""Language parts of vision-language models beside transformers, with the tower in the same files."""

from pathlib import Path

import pytest

from support.real_engines import compare
from support.vision_models import make_vision_model


@pytest.mark.parametrize("kind", ["idefics3", "lfm2_vl", "lfm3_vl", "glm_ocr"])
def test_texts_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    compare(tmp_path, make_vision_model(tmp_path, kind))
