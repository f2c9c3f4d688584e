"""Language models of vision-language families that have layers of others under names of their own."""

from dataclasses import replace

from ..architecture import Architecture
from ..fields import Fields
from ..rope import RopeConfig, interleaved_rope
from .hybrids import HYBRIDS
from .siblings import without_sections

_LLAMA_INSIDE = Architecture(
    model_type="llama", defaults={"rms_norm_eps": 1e-5}, attention_bias=True, mlp_bias=True, is_nested=True
)


def glm_ocr_ropes(
    fields: Fields, head_dim: int, positions: int, layers: int
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """Return one RoPE of neighboring pairs, whose sections have the same position in texts."""
    return interleaved_rope(without_sections(fields), head_dim, positions, layers)


MULTIMODAL: dict[str, Architecture] = {
    "Idefics3ForConditionalGeneration": _LLAMA_INSIDE,
    "SmolVLMForConditionalGeneration": _LLAMA_INSIDE,
    "Lfm2VlForConditionalGeneration": replace(HYBRIDS["Lfm2ForCausalLM"], is_nested=True),
    "Lfm3VlForConditionalGeneration": replace(HYBRIDS["Lfm3ForCausalLM"], is_nested=True),
    "GlmOcrForConditionalGeneration": Architecture(
        model_type="glm_ocr_text",
        defaults={"rms_norm_eps": 1e-5},
        block="sandwich",
        has_stacked_mlp=True,
        ropes=glm_ocr_ropes,
        is_nested=True,
        names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
}
"""Such models by the class name in `architectures` of config.json."""
