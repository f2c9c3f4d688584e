"""Description of one architecture: the defaults and rules by which its config.json is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llmbox.kernels.activation import Activation

from .attention import LatentRule, LayerSizes, Scales, WindowRule, no_windows
from .encoders.config import EncoderConfig
from .fields import MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields, attends_both_ways
from .moe import ExpertRule
from .mtp import MTPStyle
from .recurrent.config import RecurrentRule, SharedBlocksConfig
from .rope import RopeRule, one_rope

if TYPE_CHECKING:
    pass

BlockKind = Literal[
    "pre_norm", "post_norm", "sandwich", "parallel", "single", "layer_norm", "parallel_biased",
    "parallel_norms", "scaled_sandwich", "altup", "parallel_rms", "shared",
]  # fmt: skip
"""Position of a layer's norms: before attention and MLP, after them, both, one LayerNorm before attention and
MLP side by side, one norm before a layer that is attention or MLP, or LayerNorms with biases before both.
"parallel_biased" is "parallel" with a bias, "parallel_rms" with an RMS norm, and "parallel_norms" has a
LayerNorm with a bias for each of the two. "scaled_sandwich" and "altup" are those of Gemma 4 and 3n: norms as
in "sandwich", then the embedding of the layer, and a scalar or streams (`AltUpConfig`). "shared" is "single"
where some layers have a block that others have too (`SharedBlocksConfig`)."""
_PRE = ("input_layernorm", "post_attention_layernorm")
_POST = ("post_attention_layernorm", "post_feedforward_layernorm")
_SANDWICH = (*_POST, "input_layernorm", "pre_feedforward_layernorm")
NORMS: Mapping[BlockKind, tuple[str, ...]] = {
    **dict.fromkeys(("pre_norm", "layer_norm", "parallel_norms"), _PRE),
    "post_norm": _POST,
    **dict.fromkeys(("sandwich", "scaled_sandwich", "altup"), _SANDWICH),
    **dict.fromkeys(
        ("parallel", "parallel_biased", "parallel_rms", "single", "shared"), ("input_layernorm",)
    ),
}
"""Names of a layer's norms, around attention and MLP."""
BIASED_NORMS: frozenset[BlockKind] = frozenset({"layer_norm", "parallel_biased", "parallel_norms"})
"""Blocks whose norms, and that of the model after the last of them, have biases."""
AttentionGate = Literal["q_proj", "gate_proj", "g_proj"]
"""Linear with gates, by a function of which attention's results are multiplied: behind the query of each
head, or one of their own."""
OWN_GATES: frozenset[AttentionGate] = frozenset({"gate_proj", "g_proj"})
"""Linears with nothing but gates."""
GateFunction = Literal["sigmoid", "softplus"]
QKNorm = Literal["heads", "width", "no_weight", "no_weight_anywhere", "layer", "layer_by_head"]
"""QK-norm: RMS norm of queries and keys per head, over all heads of a row together, or per head without a
weight, in layers with RoPE alone or in all; or a LayerNorm with weights of each head, which checkpoints have
in one tensor or one by one."""

WIDE_NORMS: frozenset[QKNorm | None] = frozenset({"width", "layer", "layer_by_head"})
"""QK-norms that have a weight for each number of all heads."""

SizesRule = Callable[[Fields, int], tuple[LayerSizes, ...]]
"""Rule (config.json, number of layers) -> sizes of each layer; empty where all are alike. Raises
ModelError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpConfig:
    """Streams of a row (AltUp) and the augmented residual (LAuReL) of Gemma 3n."""

    streams: int
    active: int
    """Stream that passes through attention and MLP."""
    laurel_rank: int
    scales_output: bool = True
    """True if the active stream is scaled before the layer's own embedding is added."""


EncoderRule = Callable[[Fields], EncoderConfig]


RELU2: Mapping[str, Activation] = {"relu2": "relu2"}


def spelled(pairs: str) -> Mapping[str, str]:
    """Return {name: other name} for a text like `hidden_size=n_embd num_attention_heads=n_head`."""
    return dict(pair.split("=") for pair in pairs.split())


def four_times_hidden(fields: Fields) -> int:
    return 4 * fields.integer("hidden_size")


def nothing(_fields: Fields) -> None:
    pass


def refuse_options(**usual: object) -> Callable[[Fields], None]:
    """Return a rule that refuses other values of these keys."""
    return lambda fields: fields.refuse_others(usual, "of this architecture")


def no_rows(_fields: Fields) -> int:
    return 0


def as_it_is(_fields: Fields) -> Mapping[str, Any]:
    return {}


class CommonSizes(NamedTuple):
    """Sizes that config.json has for every architecture."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureTraits:
    """Properties that all models of an architecture share. `ModelConfig` has them too, as they are."""

    model_type: str
    norms_add_one: bool = False
    """True if norms multiply by 1 + w."""
    fits_float16: bool = True
    """True if the outputs of layers stay within the range of float16, 65504."""
    has_sinks: bool = False
    """True if each head has a sink: one more score of its softmax, which takes a share and adds nothing."""
    block: BlockKind = "pre_norm"
    """Position of norms."""
    has_stacked_projections: bool = False
    """True if checkpoints hold q, k and v as one tensor."""
    stacks_by_group: bool = False
    """True if that tensor holds the queries, the key and the value of each KV head in turn."""
    has_stacked_mlp: bool = False
    """True if checkpoints hold gate and up of MLPs as one tensor."""
    attention_gate: AttentionGate | None = None
    """Projection that makes the gates of attention's results; None: there is none."""
    gate_function: GateFunction = "sigmoid"
    """Function of a gate by which attention's result is multiplied."""
    norms_after_rope: bool = False
    """True if QK-norm comes after RoPE."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Modules of a layer, or whole names of tensors, that its checkpoints call otherwise: {name in
    `engine/model`: name there}."""
    has_norm_weights: bool = True
    """False if norms of rows have neither weights nor biases."""
    norms_embedding: bool = False
    """True if rows are normed before the first layer too, without a weight."""
    has_plain_last_norm: bool = False
    """True if the norm after the last layer multiplies by w where others multiply by 1 + w."""
    has_sub_norms: bool = False
    """True if attention's result, and the inner rows of MLPs, are normed before the linear that follows."""
    norms_values: bool = False
    """True if values are normed too, without a weight."""
    norms_experts: bool = False
    """True if the sum of experts is normed, in layers that have some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture(ArchitectureTraits):
    """Properties of one architecture. Rules get the fields of config.json, completed by `defaults`."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers, where they differ from those that most architectures share, or functions
    that compute them from other fields."""
    head_dim: int | None = None
    """Default head dimension; None: hidden_size / num_attention_heads."""
    hidden_acts: Mapping[str, Activation] = field(default_factory=lambda: {"silu": "silu"})
    """Activations by the values that config.json may have for `hidden_act`, the default first."""
    is_nested: bool = False
    """True if config.json has it in `text_config`, as the language model of a vision-language model."""
    nested: tuple["Architecture", ...] = ()
    """Architectures that `text_config` may name by its `model_type`; empty: this one whatever it names."""
    text_type: str = ""
    """`model_type` of `text_config` where that names none. It may name any architecture; empty: those of
    `nested`."""
    attention_bias: bool = False
    """True if config.json may enable biases of q, k, v and o."""
    qkv_bias: bool = False
    """True if q, k and v always have biases."""
    mlp_bias: bool = False
    """True if config.json may enable biases of the MLP."""
    qk_norm: QKNorm | None = None
    qk_norm_flag: str = ""
    """Key of config.json without which there is no QK-norm; empty: there is."""
    recurrent_block: BlockKind | None = None
    """Position of norms in recurrent layers, if it is another."""
    head_bias_flag: str = ""
    """Key of config.json that says if the output head has a bias; empty: it has none."""
    never_ties: bool = False
    """True if the output head has a matrix of its own, whatever `tie_word_embeddings` says."""
    head_gate_flag: str = ""
    """Key of config.json without which each head's result is multiplied by the sigmoid of a gate of its own
    (`g_proj`); empty: there are no such gates."""
    windows: WindowRule = no_windows
    ropes: RopeRule = one_rope
    experts: ExpertRule = lambda _fields, _layers: None
    recurrence: RecurrentRule = lambda _fields, _layers: None
    latent: LatentRule = lambda _fields: None
    scales: Callable[[Fields], Scales] = lambda _fields: Scales()
    encoder: EncoderRule | None = None
    """Rule for an encoder of the BERT family, which sees a whole text at once and makes no text."""
    may_be_bidirectional: bool = False
    """True if config.json may let each token attend to those after it too, for embeddings."""
    own_code: str = ""
    """Class in `auto_map` of its repositories that transformers has adopted, so that the code need not be
    run. Models with other code of their own are refused."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that this architecture calls otherwise: {usual key: its key}."""
    sizes: Callable[[Fields], Mapping[str, Any]] = as_it_is
    """Rule that returns the fields which this architecture computes from others."""
    layer_sizes: SizesRule = lambda _fields, _layers: ()
    per_layer: Callable[[Fields], tuple[int, int]] = lambda _fields: (0, 0)
    """Rule that returns the width of the embeddings that each layer has, and the tokens that these know."""
    altup: Callable[[Fields], AltUpConfig | None] = lambda _fields: None
    shared: Callable[[Fields], SharedBlocksConfig | None] = lambda _fields: None
    mtp: MTPStyle | None = None
    """Names of the layer for multi-token prediction that its checkpoints may have; None: they have none, or
    another one."""
    variant: Callable[[Fields], Mapping[str, Any]] = as_it_is
    """Rule that returns the fields of this class which depend on config.json."""
    position_rows: Callable[[Fields], int] = no_rows
    """Rule that returns the rows of the table of learned positions."""
    refuse: Callable[[Fields], None] = nothing
    """Rule that raises ModelError for options that would be computed wrongly."""

    def traits(self) -> dict[str, Any]:
        """Return the fields of `ArchitectureTraits`."""
        return {each.name: getattr(self, each.name) for each in dataclass_fields(ArchitectureTraits)}

    def complete(self, fields: Fields) -> Fields:
        """Return the fields with the defaults, under the names that most architectures have.

        A file of older transformers has RoPE parameters of its own, so a default for them must not add to
        these.
        """
        raw = {**self.defaults, **fields.raw}
        raw |= {usual: raw[key] for usual, key in self.aliases.items() if raw.get(key) is not None}
        if fields.raw.get("rope_scaling") is not None and fields.raw.get("rope_parameters") is None:
            raw["rope_parameters"] = None
        called = {usual: key for usual, key in self.aliases.items() if fields.raw.get(key) is not None}
        found = Fields(raw, fields.where, called)
        for key, default in self.defaults.items():
            if callable(default) and (raw[key] is None or raw[key] is default):
                raw[key] = default(found)
        return found.replace(**self.sizes(found))

    def read_sizes(self, fields: Fields) -> CommonSizes:
        """Return the sizes of completed fields. Raises ModelError for those that fit no model."""
        heads = fields.integer("num_attention_heads", most=MAX_HEADS)
        hidden = fields.integer("hidden_size", most=MAX_WIDTH)
        head_dim = fields.integer("head_dim", self.head_dim or hidden // heads or None, most=MAX_WIDTH)
        kv_heads = fields.integer("num_key_value_heads", heads, most=MAX_HEADS)
        if heads % kv_heads:
            raise fields.error(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise fields.error(f"head_dim {head_dim} must be even")
        if self.encoder is not None and (heads * head_dim, kv_heads) != (hidden, heads):
            raise fields.error(f"{heads} heads of {head_dim} do not make up hidden_size {hidden}")
        layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        positions = fields.integer("max_position_embeddings", most=MAX_POSITIONS)
        return CommonSizes(layers, hidden, heads, kv_heads, head_dim, positions)

    def has_qk_norm(self, fields: Fields) -> bool:
        return not self.qk_norm_flag or fields.flag(self.qk_norm_flag, default=False)

    def read_activation(self, fields: Fields) -> Activation:
        acts = self.hidden_acts
        name = fields.text("hidden_act", next(iter(acts)))
        if name not in acts:
            raise fields.error(f"hidden_act {name!r} is not supported, only {' or '.join(map(repr, acts))}")
        return acts[name]


def refuse_unsupported(fields: Fields, kind: Architecture) -> None:
    """Raise ModelError for options that would be computed wrongly."""
    both = attends_both_ways(fields) and not kind.may_be_bidirectional
    if both or fields.raw.get("is_causal") is False:
        raise fields.error("attention in both directions is not supported, only to tokens before")
    kind.refuse(fields)


_OF_FAMILIES = {
    "norms with gates, and attention gated by latents of queries": "AXK2",
    "an encoder beside the decoder": "Bart Blenderbot Florence2 LED LongT5 M2M100 MBart MT5 Marian Pegasus "
    "ProphetNet SwitchTransformers T5 T5Gemma T5Gemma2 UMT5 Whisper",
    "attention scores that fall with the distance (ALiBi)": "Bloom Mpt",
    "patches of bytes": "Blt",
    "queries, values and keys in four stacks": "CodeGen",
    "learned biases of attention by distance": "CpmAnt",
    "experts in one matrix, and limits of queries, keys and values": "Dbrx",
    "attention to compressed tokens, and hyper-connections": "DeepseekV4",
    "attention as the difference of two softmaxes": "DiffLlama",
    "attention masks made of values, and weighted residuals": "Doge",
    "sparse attention beside sliding windows of latents": "Dots3Note",
    "the model that it drafts for, which is loaded with --draft and this folder": "Eagle3Llama",
    "tokens of images, which it writes too": "Emu3",
    "experts of texts beside experts of images": "Ernie4_5_VLMoe Ernie4_5_VL_Moe",
    "LayerNorms with biases of each head's queries and keys": "Fuyu Persimmon",
    "a bias of attention in the last layer alone": "GPTNeoXJapanese",
    "attention to the tokens that an indexer selects, and hyper-connections": "Glm5Next HYV4",
    "two stacks of layers that run several times": "HrmText",
    "learned biases of attention by distance, and convolutions of keys and values": "Inkling Inkling2",
    "mixtures of attention heads": "JetMoe",
    "layers with attention twice, and experts that return their input": "LongcatFlash",
    "linear attention with fixed decays (lightning attention)": "MiniMax",
    "attention to blocks of tokens that an indexer selects": "MiniMaxM3Sparse MiniMaxM3VL",
    "RoPE and queries scaled by learned numbers, and latents that layers share": "MistralLarge4",
    "layers that attend to images between the others": "Mllama",
    "a dense layer and a norm before the output head": "ModernBertDecoder",
    "gates of residuals, and norms of scaled inputs": "MuseSpark",
    "attention in both directions within the prompt": "PaliGemma",
    "attention to the tokens that an indexer selects, and embeddings of n-grams": "Qwen4Exp",
    "gated linear recurrences (RG-LRU)": "RecurrentGemma",
    "the time mixing of RWKV": "Rwkv",
    "sines and cosines of positions, added to embeddings": "XGLM",
    "attention that several layers share": "Zamba",
    "convolutions of queries and keys, and routers with an MLP": "Zaya",
    "memories in matrices with exponential gates (mLSTM)": "xLSTM",
}
MISSING: dict[str, str] = {
    **{f"{name}ForCausalLM": part for part, names in _OF_FAMILIES.items() for name in names.split()},
    "CTRLLMHeadModel": "sines and cosines of positions, added to embeddings",
    "LlamaForCausalLMEagle3": "the model that it drafts for, which is loaded with --draft and this folder",
    "OpenAIGPTLMHeadModel": "norms of the residual itself",
    "XLNetLMHeadModel": "attention to relative positions",
}
"""Parts that these architectures need and that are missing here, by the class name of the language model."""
