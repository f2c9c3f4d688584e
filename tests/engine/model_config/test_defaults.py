"""Keys that a config.json leaves out have the defaults of transformers' config classes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from llmbox.engine.errors import ModelError
from llmbox.engine.model_config.config import ModelConfig, parse_config, parse_fields
from llmbox.engine.model_config.fields import Fields
from llmbox.engine.model_config.registry import ARCHITECTURES
from support.families import COMMON, FAMILIES, LEFT_OUT, SIBLINGS

SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "ffn_dim", "ffn_hidden_size",
}  # fmt: skip
"""Keys without which a config.json is refused, or its weights are, whose shapes these say."""
NOT_IN_TRANSFORMERS = {
    *("MiMoForCausalLM", "BailingMoeV2ForCausalLM", "NewModel", "JinaBertModel", "ExaoneForCausalLM"),
    *("InternLM2ForCausalLM", "MiniCPMForCausalLM", "Phi4MMForCausalLM"),
    *("VoxtralForConditionalGeneration", "InternVLChatModel", "DeciLMForCausalLM"),
    *("BailingMoeForCausalLM", "DeepseekForCausalLM"),
}
REFUSED = {
    "Glm4vMoeForConditionalGeneration",  # half a head of 42 dimensions
    "XLMRobertaLoRA",  # the class in transformers has other keys than the repository's code
    "InternVLForConditionalGeneration",  # has no text part of its own
    "Qwen3OmniMoeThinkerForConditionalGeneration",  # heads of 73 dimensions
}
"""Architectures whose class in transformers has defaults of no model."""
TIES = ("Qwen3VLMoeForConditionalGeneration", "tie_word_embeddings")
"""A key that counts beside `text_config` alone."""


def fields_of(name: str, raw: dict[str, Any], path: Path) -> ModelConfig:
    kind = ARCHITECTURES[name]
    named = {**raw, "model_type": kind.model_type}
    whole = {"text_config": named, "architectures": [name]} if kind.is_nested else named
    return parse_fields(Fields({**whole, "architectures": [name]}, "config.json"), path)


def comparable(config: ModelConfig) -> list[tuple[str, Any]]:
    """Return the fields; a multiplier of attention scores that is the usual one is written out."""
    usual = config.head_dim**-0.5
    return [
        (key, getattr(config, key)) for key in config.__dataclass_fields__ if key not in {"scales", "dtype"}
    ] + [(key, getattr(config.scales, key) or usual) for key in config.scales.__dataclass_fields__]


def complete(kind: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """Return all keys as transformers fills them in."""
    known = {key: value for key, value in raw.items() if key not in {"model_type", "transformers_version"}}
    return json.loads(json.dumps(kind(**copy.deepcopy(known)).to_dict(), default=str))


def class_of(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[ARCHITECTURES[name].model_type]


_BY_TYPE = {
    (kind.model_type, kind.is_nested): name for name, kind in ARCHITECTURES.items() if not kind.text_type
}
NAMES = sorted(set(_BY_TYPE.values()) - NOT_IN_TRANSFORMERS - REFUSED)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_left_out_has_the_default_of_transformers(tmp_path: Path, name: str) -> None:
    kind, model_type = class_of(name), ARCHITECTURES[name].model_type
    own = {**FAMILIES, **SIBLINGS}.get(model_type)
    tiny = {} if own is None else {k: v for k, v in {**COMMON, **own}.items() if v is not LEFT_OUT}
    whole = complete(kind, tiny)
    fields_of(name, whole, tmp_path)
    ropes = whole.get("rope_parameters")
    lefts = [{key} for key in whole if key not in SIZES and (name, key) != TIES]
    lefts += [{"rope_parameters", key} for key in (ropes if isinstance(ropes, dict) else ())]
    for left in lefts:
        raw = {key: value for key, value in whole.items() if key not in left}
        if len(left) == 2:
            raw["rope_parameters"] = {key: value for key, value in ropes.items() if key not in left}
        try:
            expected = fields_of(name, complete(kind, raw), tmp_path)
        except Exception:  # noqa: BLE001 - no default of its own, or one that neither takes
            continue
        try:
            found = fields_of(name, raw, tmp_path)
        except ModelError as error:
            assert "is missing" in str(error)  # noqa: PT017 - a value that was guessed fails below
            continue
        assert comparable(found) == comparable(expected), left


NESTED = sorted(
    name
    for name, kind in ARCHITECTURES.items()
    if kind.is_nested and name in NAMES and not kind.model_type.startswith(("deepseek", "nemotron"))
)


@pytest.mark.parametrize("name", NESTED)
def test_a_text_config_may_leave_all_sizes_out(tmp_path: Path, name: str) -> None:
    """transformers before 5 wrote only what differs from the class, as in the files of LLaVA and Pixtral."""
    usual = complete(class_of(name), {})
    if name == TIES[0]:
        usual.pop(TIES[1])
    assert comparable(fields_of(name, {}, tmp_path)) == comparable(fields_of(name, usual, tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "sizes"),
    [
        (
            "LlavaForConditionalGeneration",  # as that of llava-1.5-7b
            {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
            (4096, 11008, 32, 32, 32, 128),
        ),
        (
            "LlavaForConditionalGeneration",  # as that of Pixtral 12B
            {"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40},
            (5120, 14336, 40, 32, 8, 128),
        ),
        ("InternVLForConditionalGeneration", {"model_type": "qwen3"}, (4096, 22016, 32, 32, 32, 128)),
        ("AyaVisionForConditionalGeneration", {"num_hidden_layers": 8}, (8192, 22528, 8, 64, 64, 128)),
        ("Mistral3ForConditionalGeneration", {"model_type": "mistral4"}, None),
    ],
)
def test_the_language_model_that_a_text_config_names_decides(
    tmp_path: Path, name: str, text: dict[str, Any], sizes: tuple[int, ...] | None
) -> None:
    fields = Fields({"architectures": [name], "text_config": text}, "config.json")
    config = parse_fields(fields, tmp_path)
    if sizes is None:
        assert (config.hidden_size, config.num_layers, config.num_heads) == (4096, 36, 32)
    else:
        assert sizes == (
            config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads,
            config.num_kv_heads, config.head_dim,
        )  # fmt: skip


CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096}
CLIP |= {"num_attention_heads": 16, "num_hidden_layers": 24, "image_size": 336, "patch_size": 14}


def test_the_tower_of_llava_1_5_is_read_as_published(tmp_path: Path) -> None:
    """Its `text_config` leaves the width of the language model out."""
    raw = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "vision_config": CLIP | {"projection_dim": 768, "vocab_size": 32000},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = parse_config(tmp_path)
    assert config.image_problem == ""
    assert config.vision is not None
    assert config.vision.hidden_size == config.hidden_size == 4096
    assert config.num_parameters == 6_738_939_904


def test_llava_1_6_is_read_as_published(tmp_path: Path) -> None:
    """It has 7,566,747,648 parameters, of which the last layer and norm of its tower are not run."""
    raw = {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_token_index": 32000,
        "text_config": {
            "architectures": ["MistralForCausalLM"],
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 32064,
        },
        "tie_word_embeddings": False,
        "use_image_newline_parameter": True,
        "vision_config": CLIP,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = parse_config(tmp_path)
    assert config.vision is not None
    unused = 4 * (1024 + 1) * 1024 + 4096 * (2 * 1024 + 1) + 1024 + 6 * 1024
    assert config.num_parameters + config.vision.num_params + unused == 7_566_747_648
