"""Families whose images are read, and what is missing for the others."""

from pathlib import Path

import pytest

from llmbox.engine.errors import ModelError
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.registry import ARCHITECTURES
from llmbox.engine.model_config.vision import MISSING_PARTS
from llmbox.engine.model_config.vision.families import VISION_FAMILIES, find_vision
from support.tiny_models import write_json
from support.vision_models import MODELS, TEXT

OTHERS = {"smolvlm", "qwen3_vl_moe", "qwen3_5_moe", "glm46v", "glmga", "internvl_chat", "vlm"}
"""Families that compute what one of `MODELS` does: `internvl_chat` in tests/engine/vision/test_tokens.py,
`vlm` in tests/engine/model/test_siblings.py."""
ALIASES = {"shieldgemma2": "ShieldGemma2ForImageClassification"}
"""Classes of published files, where transformers maps a model type to the class of another."""
OF_TEXTS = {"mistral4"}
"""Language models in transformers' list, which have no tower."""


def test_every_family_is_tested() -> None:
    assert OTHERS | {kind.removesuffix("_clip") for kind in MODELS} == set(VISION_FAMILIES)


@pytest.mark.parametrize("section", [5, "abc", [1, 2], [4, -1, 5], [[1], 2, 3], [2, 3, "3"]])
def test_sections_of_a_cohere_compass_that_are_no_three_numbers_leave_its_images_out(
    tmp_path: Path, section: object
) -> None:
    _, values, processor = MODELS["cohere_compass"]
    text = values["text_config"] | {"model_type": "cohere_compass_text"}
    ropes = {"full_attention": None, "sliding_attention": {"rope_theta": 1e4, "mrope_section": section}}
    raw = values | {"model_type": "cohere_compass", "architectures": [MODELS["cohere_compass"][0]]}
    write_json(tmp_path / "config.json", raw | {"text_config": text | {"rope_parameters": ropes}})
    write_json(tmp_path / "preprocessor_config.json", processor)
    vision, problem = find_vision(tmp_path)
    assert vision is None
    assert "mrope_section" in problem


def refused_models() -> dict[str, str]:
    """Return the classes of models that see in transformers and whose images are not read, by model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    kinds = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {
        kind: ALIASES.get(kind, name)
        for kind, name in kinds.items()
        if kind not in VISION_FAMILIES and kind not in OF_TEXTS
    }


def test_every_model_that_sees_is_read_or_refused_with_the_part_that_is_missing(tmp_path: Path) -> None:
    refused, without_reason = refused_models(), []
    assert "paligemma" in refused
    for kind, name in refused.items():
        model = {"architectures": [name], "model_type": kind, "vision_config": {}, "text_config": TEXT}
        write_json(tmp_path / "config.json", model)
        if name in ARCHITECTURES:  # texts are read
            problem = find_vision(tmp_path)[1]
        else:
            with pytest.raises(ModelError) as error:
                parse_config(tmp_path)
            problem = str(error.value)
        if "it needs" not in problem:
            without_reason.append((kind, problem))
    assert not without_reason


def test_no_family_that_is_read_has_a_missing_part() -> None:
    assert not MISSING_PARTS.keys() & {name for name, *_ in MODELS.values()}


@pytest.mark.parametrize("kind", ["gemma3n", "minicpmv4_7"])
def test_a_tower_that_is_not_read_leaves_the_text(tmp_path: Path, kind: str) -> None:
    name = refused_models()[kind]
    write_json(tmp_path / "config.json", {"architectures": [name], "model_type": kind, "vision_config": {}})
    vision, why = find_vision(tmp_path)
    assert vision is None
    assert MISSING_PARTS[name] in why
