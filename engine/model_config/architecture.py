"""Description of one architecture: the defaults and rules by which its config.json is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmbox.kernels.activation import Activation

from .fields import Fields
from .latent import LatentRule, no_latent
from .moe import ExpertRule, no_experts
from .multipliers import Scales, no_scales
from .recurrent import RecurrentRule, no_recurrence
from .rope import RopeRule, one_rope
from .sliding_window import WindowRule, no_windows

BlockKind = Literal["pre_norm", "post_norm", "sandwich", "parallel"]
"""Position of a layer's norms: before attention and MLP, after them, both, or one LayerNorm before attention
and MLP side by side."""
QKNorm = Literal["heads", "width"]
"""QK-norm: RMS norm of queries and keys per head, or over all heads of a row together."""


def nothing(_fields: Fields) -> None:
    pass


def as_it_is(_fields: Fields) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Properties of one architecture. Rules get the fields of config.json, completed by `defaults`."""

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers, where they differ from those that most architectures share."""
    head_dim: int | None = None
    """Default head dimension; None: hidden_size / num_attention_heads."""
    hidden_acts: tuple[str, ...] = ("silu",)
    """Values that config.json may have for `hidden_act`, the default first."""
    activation: Activation = "silu"
    """Activation that they mean."""
    norms_add_one: bool = False
    """True if norms multiply by 1 + w."""
    fits_float16: bool = True
    """True if the outputs of layers stay within the range of float16, 65504."""
    is_nested: bool = False
    """True if config.json has it in `text_config`, as the language model of a vision-language model."""
    nested: tuple["Architecture", ...] = ()
    """Architectures that `text_config` may name by its `model_type`; empty: this one whatever it names."""
    attention_bias: bool = False
    """True if config.json may enable biases of q, k, v and o."""
    qkv_bias: bool = False
    """True if q, k and v always have biases."""
    mlp_bias: bool = False
    """True if config.json may enable biases of the MLP."""
    qk_norm: QKNorm | None = None
    qk_norm_flag: str = ""
    """Key of config.json without which there is no QK-norm; empty: there is."""
    has_sinks: bool = False
    """True if each head has a sink: one more score of its softmax, which takes a share and adds nothing."""
    block: BlockKind = "pre_norm"
    has_stacked_projections: bool = False
    """True if checkpoints hold q, k and v as one tensor."""
    has_stacked_mlp: bool = False
    """True if checkpoints hold gate and up of MLPs as one tensor."""
    has_attention_gate: bool = False
    """True if attention's results are multiplied by the sigmoid of a gate, half of `q_proj` of each head."""
    windows: WindowRule = no_windows
    ropes: RopeRule = one_rope
    experts: ExpertRule = no_experts
    recurrence: RecurrentRule = no_recurrence
    latent: LatentRule = no_latent
    scales: Callable[[Fields], Scales] = no_scales
    own_code: str = ""
    """Class in `auto_map` of its repositories that transformers has adopted, so that the code need not be
    run. Models with other code of their own are refused."""
    norms_after_rope: bool = False
    """True if QK-norm comes after RoPE."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that this architecture calls otherwise: {usual key: its key}."""
    sizes: Callable[[Fields], Mapping[str, Any]] = as_it_is
    """Rule that returns the fields which this architecture computes from others."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer that its checkpoints call otherwise: {name in `engine/model`: name there}."""
    refuse: Callable[[Fields], None] = nothing
    """Rule that raises ModelError for options that would be computed wrongly."""
