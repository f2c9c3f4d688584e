"""Architectures of GGUF files by their names there. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from ..errors import UnsupportedArchitecture
from .families import (
    Config,
    bert_fields,
    deepseek2_fields,
    ernie_fields,
    falcon_fields,
    gpt_neox_fields,
    gpt_oss_fields,
    granite_fields,
    hunyuan_moe_fields,
    jina_fields,
    layer_norm_fields,
    llama4_fields,
    llama_fields,
    minimax_fields,
    mistral3_fields,
    mistral4_fields,
    modern_fields,
    nomic_fields,
    nomic_moe_fields,
    nothing_more,
    olmoe_fields,
    phi3_fields,
    qwen2_moe_fields,
    qwen3_moe_fields,
    sigmoid_routed_fields,
    stablelm_fields,
    window_fields,
)
from .mixed_layers import (
    cohere_fields,
    deci_fields,
    falcon_h1_fields,
    gemma3n_fields,
    gemma4_fields,
    gemma_embedding_fields,
    gemma_fields,
    glm_dsa_fields,
    granite_hybrid_fields,
    jamba_fields,
    kimi_linear_fields,
    lfm2_fields,
    lfm2_moe_fields,
    mamba1_fields,
    mamba2_fields,
    nemotron_h_fields,
    olmo2_fields,
    olmo_fields,
    qwen3_5_fields,
    windows_by_type,
)
from .names import (
    BERT,
    DELTA,
    FALCON,
    FALCON_H1,
    GEMMA3N,
    GEMMA4,
    GLM4,
    GPT,
    GRANITE,
    KIMI,
    LATE_NORM,
    LAYER,
    LLAMA4,
    MIXER,
    SANDWICH,
    SHORT_CONV,
    SHORT_CONV_MOE,
    STACKED,
    STACKED_BERT,
    Names,
)
from .reader import GgufFile


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """Differences of one architecture between GGUF and a checkpoint."""

    name: str
    """Class name in `architectures` of config.json, which the `model_type` follows from."""
    layer: Names = field(default_factory=lambda: LAYER)
    """Names of a layer's tensors: {in a checkpoint: in GGUF}."""
    has_pairs: bool = False
    """RoPE pairs of query and key rows are interleaved, not half a head apart."""
    norms_hold_one: bool = False
    """Norms are stored as 1 + w."""
    activation: str = "silu"
    """`hidden_act` of config.json, which a file does not say; empty: config.json has it otherwise."""
    is_partial: bool = False
    """RoPE may rotate a part of each head."""
    is_encoder: bool = False
    """True for a model that attends in both directions and makes vectors."""
    has_attention: bool = True
    """False if no layer has attention, or layers have heads that only `fields` reads."""
    fields: Callable[[GgufFile, Config], Config] = nothing_more
    """Rule (file, config.json so far) -> further keys of config.json. Raises ModelError."""


_LLAMA = GgufArchitecture(name="LlamaForCausalLM", has_pairs=True, fields=llama_fields)
_QWEN2 = GgufArchitecture(name="Qwen2ForCausalLM", fields=window_fields)
_QWEN3 = GgufArchitecture(name="Qwen3ForCausalLM", fields=window_fields)
_QWEN3_MOE = GgufArchitecture(name="Qwen3MoeForCausalLM", fields=qwen3_moe_fields)
_QWEN3_5 = GgufArchitecture(
    name="Qwen3_5ForCausalLM", layer=DELTA, norms_hold_one=True, is_partial=True, fields=qwen3_5_fields
)
_QWEN3_5_MOE = replace(_QWEN3_5, name="Qwen3_5MoeForCausalLM")
_GRANITE = GgufArchitecture(name="GraniteForCausalLM", has_pairs=True, layer=GRANITE, fields=granite_fields)
_GEMMA = GgufArchitecture(name="GemmaForCausalLM", norms_hold_one=True, fields=gemma_fields, activation="")
_NEMOTRON_H = GgufArchitecture(
    name="NemotronHForCausalLM", layer=MIXER, is_partial=True, activation="", fields=nemotron_h_fields
)
_HUNYUAN = GgufArchitecture(name="HunYuanDenseV1ForCausalLM")
_LFM2 = GgufArchitecture(name="Lfm2ForCausalLM", layer=SHORT_CONV, fields=lfm2_fields)
_ERNIE = GgufArchitecture(name="Ernie4_5ForCausalLM", fields=ernie_fields)
_COHERE = GgufArchitecture(name="CohereForCausalLM", fields=cohere_fields)
_GPT = GgufArchitecture(name="Starcoder2ForCausalLM", layer=GPT, activation="gelu", fields=layer_norm_fields)
_BERT = GgufArchitecture(name="BertModel", layer=BERT, activation="gelu", is_encoder=True, fields=bert_fields)
_GLM4_MOE = GgufArchitecture(
    name="Glm4MoeForCausalLM", layer=LATE_NORM, is_partial=True, fields=sigmoid_routed_fields
)

ARCHITECTURES: Final = {
    "llama": _LLAMA,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "qwen2vl": _QWEN2,
    "qwen3vl": _QWEN3,
    "qwen2moe": GgufArchitecture(name="Qwen2MoeForCausalLM", fields=qwen2_moe_fields),
    "qwen3moe": _QWEN3_MOE,
    "qwen3vlmoe": _QWEN3_MOE,
    "qwen3next": _QWEN3_5_MOE,
    "qwen35": _QWEN3_5,
    "qwen35moe": _QWEN3_5_MOE,
    "gpt-oss": GgufArchitecture(name="GptOssForCausalLM", layer=LATE_NORM, fields=gpt_oss_fields),
    "glm4": GgufArchitecture(name="Glm4ForCausalLM", layer=GLM4, is_partial=True),
    "glm4moe": _GLM4_MOE,
    "deepseek2": GgufArchitecture(name="DeepseekV3ForCausalLM", fields=deepseek2_fields),
    "glm-dsa": GgufArchitecture(name="GlmMoeDsaForCausalLM", fields=glm_dsa_fields),
    "dots1": replace(_GLM4_MOE, name="Dots1ForCausalLM", layer=LAYER),
    "bailingmoe2": replace(_GLM4_MOE, name="BailingMoeV2ForCausalLM", layer=LAYER),
    "minimax-m2": GgufArchitecture(name="MiniMaxM2ForCausalLM", is_partial=True, fields=minimax_fields),
    "mistral3": GgufArchitecture(name="Ministral3ForCausalLM", has_pairs=True, fields=mistral3_fields),
    "mistral4": GgufArchitecture(name="Mistral4ForCausalLM", fields=mistral4_fields),
    "phi3": GgufArchitecture(name="Phi3ForCausalLM", layer=STACKED, is_partial=True, fields=phi3_fields),
    "internlm2": _LLAMA,
    "minicpm": _GRANITE,
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, name="GraniteMoeForCausalLM"),
    "granitehybrid": replace(
        _GRANITE, name="GraniteMoeHybridForCausalLM", is_partial=True, fields=granite_hybrid_fields
    ),
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, name="Lfm2MoeForCausalLM", layer=SHORT_CONV_MOE, fields=lfm2_moe_fields),
    "falcon-h1": GgufArchitecture(name="FalconH1ForCausalLM", layer=FALCON_H1, fields=falcon_h1_fields),
    "kimi-linear": GgufArchitecture(name="KimiLinearForCausalLM", layer=KIMI, fields=kimi_linear_fields),
    "llama4": GgufArchitecture(name="Llama4ForCausalLM", layer=LLAMA4, fields=llama4_fields),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "jamba": GgufArchitecture(name="JambaForCausalLM", layer=FALCON_H1, fields=jamba_fields),
    "mamba": GgufArchitecture(
        name="MambaForCausalLM", layer=MIXER, activation="", has_attention=False, fields=mamba1_fields
    ),
    "mamba2": GgufArchitecture(
        name="Mamba2ForCausalLM", layer=MIXER, activation="", has_attention=False, fields=mamba2_fields
    ),
    "smollm3": replace(_LLAMA, name="SmolLM3ForCausalLM", fields=window_fields),
    "arcee": replace(_LLAMA, name="ArceeForCausalLM", activation="relu2", fields=window_fields),
    "olmo": GgufArchitecture(name="OlmoForCausalLM", has_pairs=True, fields=olmo_fields),
    "olmo2": GgufArchitecture(name="Olmo2ForCausalLM", layer=SANDWICH, fields=olmo2_fields),
    "olmoe": GgufArchitecture(name="OlmoeForCausalLM", fields=olmoe_fields),
    "deci": GgufArchitecture(name="DeciLMForCausalLM", has_pairs=True, fields=deci_fields),
    "exaone": replace(_LLAMA, has_pairs=False),
    "exaone4": GgufArchitecture(name="Exaone4ForCausalLM", layer=SANDWICH, fields=windows_by_type),
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, name="Cohere2ForCausalLM"),
    "ernie4_5": _ERNIE,
    "ernie4_5-moe": replace(_ERNIE, name="Ernie4_5_MoeForCausalLM"),
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": replace(_HUNYUAN, name="HunYuanMoEV1ForCausalLM", fields=hunyuan_moe_fields),
    "seed_oss": GgufArchitecture(name="SeedOssForCausalLM", layer=LATE_NORM),
    "gpt2": replace(_GPT, name="GPT2LMHeadModel", activation="gelu_new"),
    "gptneox": replace(_GPT, name="GPTNeoXForCausalLM", is_partial=True, fields=gpt_neox_fields),
    "falcon": replace(_GPT, name="FalconForCausalLM", layer=FALCON, fields=falcon_fields),
    "phi2": replace(_GPT, name="PhiForCausalLM", activation="gelu_new", is_partial=True),
    "stablelm": GgufArchitecture(name="StableLmForCausalLM", is_partial=True, fields=stablelm_fields),
    "starcoder": replace(_GPT, name="GPTBigCodeForCausalLM", activation="gelu_new"),
    "starcoder2": replace(_GPT, activation="gelu_new"),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, name="Gemma2ForCausalLM", layer=SANDWICH),
    "gemma3": replace(_GEMMA, name="Gemma3ForCausalLM", layer=SANDWICH),
    "gemma3n": GgufArchitecture(
        name="Gemma3nForCausalLM", layer=GEMMA3N, activation="", fields=gemma3n_fields
    ),
    "gemma4": GgufArchitecture(
        name="Gemma4ForCausalLM", layer=GEMMA4, activation="", has_attention=False, fields=gemma4_fields
    ),
    "gemma-embedding": replace(
        _GEMMA, name="Gemma3TextModel", layer=SANDWICH, is_encoder=True, fields=gemma_embedding_fields
    ),
    "bert": _BERT,
    "nomic-bert": replace(_BERT, name="NomicBertModel", activation="silu", fields=nomic_fields),
    "nomic-bert-moe": replace(_BERT, name="NomicBertModel", fields=nomic_moe_fields),
    "modern-bert": replace(_BERT, name="ModernBertModel", layer=STACKED, activation="", fields=modern_fields),
    "jina-bert-v2": replace(_BERT, name="JinaBertModel", fields=jina_fields),
    "jina-bert-v3": replace(_BERT, name="JinaEmbeddingsV3Model"),
}
"""Architectures by GGUF's name. Files of EXAONE 3 and InternLM 2 have the tensors of a Llama, those of a
MiniCPM those of a Granite. Mistral and Mixtral are called llama, Kimi K2 and GLM-4.7-Flash deepseek2,
RoBERTa and XLM-R bert, without the rows of positions that stand for padding.
Texts of a Qwen-VL are those of a Qwen: its file holds the language part, and positions in images are not
used.
Qwen3-Next is read as Qwen3.5: files have the linears of its gated delta nets in the same parts.
"""

_OTHER_FILES: Final = {
    "adapter": "a LoRA adapter: name the file of its base model (adapters are read from PEFT's folders)",
    "imatrix": "an importance matrix, which helps to quantize: name the file of the model",
    "mmproj": "a projector (mmproj), the part of a model that reads images: name the file of the language "
    "model, and leave this one beside it",
}
"""Values of `general.type` of files that hold no model."""


def architecture_of(gguf: GgufFile) -> GgufArchitecture:
    """Look up the file's architecture. Raises UnsupportedArchitecture."""
    other = gguf.metadata.get("general.type")
    if isinstance(other, str) and other in _OTHER_FILES:
        raise UnsupportedArchitecture(f"{gguf.path} is {_OTHER_FILES[other]}")
    name = gguf.architecture
    if name == "clip":
        raise UnsupportedArchitecture(f"{gguf.path} is {_OTHER_FILES['mmproj']}")
    if name not in ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{gguf.path}: architecture {name[:80]!r} in GGUF is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    found = ARCHITECTURES[name]
    if name == "jina-bert-v2" and "blk.0.ffn_gate.weight" not in gguf.tensors:
        return replace(found, layer=STACKED_BERT)
    return found
