"""Multi-token prediction (MTP): a layer behind the last one that reads hidden states and the next token, and
predicts the token after it.

    deepseek  `model.layers.N` of N layers: DeepSeek-V3, GLM-4-MoE, GLM-4.7-Flash
    qwen      `mtp.`: Qwen3-Next, Qwen3.5

DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2. Embedding and output head are those of the model; copies of
them in a checkpoint are not read.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..checkpoint.index import list_tensors
from ..errors import ModelError
from .fields import Fields
from .shape import ModelShape

if TYPE_CHECKING:
    from .config import ModelConfig

MTPStyle = Literal["deepseek", "qwen"]
_WIDE = frozenset({"BF16", "F16", "F32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig:
    """Names of a checkpoint's MTP layer, and what differs between families."""

    prefix: str
    """Prefix of its norms and of the linear that joins hidden state and embedding."""
    layer: str
    """Name of its decoder layer."""
    fc: str
    hidden_norm: str
    embedding_norm: str
    norm: str
    """Name of the norm before the output head."""
    returns_normed: bool = False
    """True if the next token is predicted from rows after that norm."""
    hides_first: bool = True
    """True if the embedding of the first row of a text counts as zeros."""
    is_dense: bool = False
    """True if the layer has an MLP, whatever others have."""
    is_wide: bool = False
    """True if its linears are unquantized, whatever others are."""


def find_mtp(style: MTPStyle | None, fields: Fields, directory: Path, layers: int) -> MTPConfig | None:
    """Return the MTP layer of a checkpoint; None if it has none. Many quantized ones are published without
    it, so its tensors decide; where there are none yet, config.json does.
    """
    if style is None:
        return None
    names = mtp_names(style, layers)
    try:
        tensors = list_tensors(directory)
    except ModelError:
        keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        return names if any(fields.raw.get(key) for key in keys) else None
    if not any(name.startswith(f"{names.prefix}{names.fc}.") for name in tensors):
        return None
    output = tensors.get(f"{names.layer}.self_attn.o_proj.weight")
    return replace(
        names,
        is_dense=any(name.startswith(f"{names.layer}.mlp.down_proj.") for name in tensors),
        is_wide=output is not None and output.dtype in _WIDE,
    )


def mtp_names(style: MTPStyle, layers: int) -> MTPConfig:
    if style == "qwen":
        return MTPConfig(
            prefix="mtp.",
            layer="mtp.layers.0",
            fc="fc",
            hidden_norm="pre_fc_norm_hidden",
            embedding_norm="pre_fc_norm_embedding",
            norm="norm",
            returns_normed=True,
            hides_first=False,
        )
    return MTPConfig(
        prefix=f"model.layers.{layers}.",
        layer=f"model.layers.{layers}",
        fc="eh_proj",
        hidden_norm="hnorm",
        embedding_norm="enorm",
        norm="shared_head.norm",
    )


def mtp_layer(config: "ModelConfig") -> "ModelConfig":
    """Return the MTP layer as a model of one layer, which attends to the whole context."""
    assert config.mtp is not None
    recurrent = config.recurrent
    is_plain = [recurrent is None or not recurrent.layers[i] for i in range(config.num_layers)]
    like = max(i for i in range(config.num_layers) if is_plain[i])
    experts = config.experts
    if experts is not None:
        experts = None if config.mtp.is_dense else replace(experts, layers=(True,))
    return replace(
        config,
        num_layers=1,
        windows=(None,),
        layer_ropes=(config.layer_ropes[like],),
        recurrent=None,
        experts=experts,
        extra_layers=0,
        mtp=None,
    )


def mtp_shape(config: "ModelConfig") -> ModelShape:
    """Return the shape for the estimator. The tables are those of the model, so it has no vocabulary."""
    assert config.mtp is not None
    layer = mtp_layer(config)
    hidden, tables = config.hidden_size, 1 if config.tie_word_embeddings else 2
    params = layer.num_parameters - tables * config.vocab_size * hidden + 2 * hidden * (hidden + 1)
    wide = params if config.mtp.is_wide else 0
    shape = replace(layer.shape(), vision=None, vocab=0, tied=True)
    return replace(shape, exact_params=params, wide_params=wide)
