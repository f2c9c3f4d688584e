"""Parsing of config.json into a `ModelConfig`."""

from dataclasses import dataclass, replace
from pathlib import Path

from llmbox.kernels.activation import UNGATED, Activation

from ..checkpoint.files import read_json
from ..checkpoint.formats.floats import split_experts
from ..checkpoint.formats.registry import (
    READERS,
    count_unquantized_params,
    find_weight_format,
    running_format,
)
from ..checkpoint.formats.weight_format import GgufFormat, NotReadable, WeightFormat, check_tensors
from ..checkpoint.index import list_tensors
from ..config import Dtype
from ..errors import ModelError
from .architecture import (
    AltUpConfig,
    Architecture,
    ArchitectureTraits,
    BlockKind,
    CommonSizes,
    QKNorm,
    refuse_unsupported,
)
from .attention import IndexConfig, LatentConfig, LayerSizes, Scales, sliding_shape
from .encoders.config import EncoderConfig, has_head, has_tied_head, read_vectors
from .expected_tensors import count_layer_params, count_parameters
from .fields import (
    MAX_POSITIONS,
    MAX_WIDTH,
    Fields,
    attends_both_ways,
    checkpoint_dtype,
    norm_eps,
)
from .moe import ExpertsConfig
from .mtp import MTPConfig, find_mtp, mtp_shape
from .recurrent.config import RecurrentConfig, SharedBlocksConfig
from .registry import architecture_of, language_model
from .rope import RopeConfig
from .shape import ModelShape
from .vision.config import VisionConfig
from .vision.families import find_vision, vision_shape, why_no_tower


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ArchitectureTraits):
    """Validated configuration of a model."""

    activation: Activation
    """Activation of the gates of MLPs, or of MLPs without one."""
    dtype: Dtype
    """Dtype of the checkpoint: bfloat16, float16 or float32."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    """Epsilon of norms over rows as they are stored, divided by the residual multiplier
    (`Scales.residual`)."""
    post_norm_eps: float | None
    """Epsilon of norms after attention and MLP; None: that of the others."""
    tie_word_embeddings: bool
    """True if the output head is the embedding, or if there is no head."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm | None
    recurrent_block: BlockKind
    """Position of norms in recurrent layers."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens; None for full attention."""
    ropes: tuple[RopeConfig, ...]
    """RoPE variants; the first one decides the context limit."""
    layer_ropes: tuple[int, ...]
    """Index into `ropes` for each layer."""
    scales: Scales
    quant: str | None = None
    """Kernels' format for the numbers of a quantized checkpoint; None: no kernel has such numbers."""
    stored: WeightFormat | None = None
    """Format of a quantized checkpoint (`checkpoint/formats/registry.py`)."""
    wide_params: int = 0
    """Parameters of its unquantized linears (`count_unquantized_params`); 0 without its files."""
    has_head: bool = True
    """False for a model that only gives embeddings."""
    experts: ExpertsConfig | None = None
    recurrent: RecurrentConfig | None = None
    has_head_gate: bool = False
    """True if the result of each head is multiplied by the sigmoid of one number."""
    head_bias: bool = False
    """True if the output head has a bias."""
    latent: LatentConfig | None = None
    """Latent attention (MLA); `head_dim` is then the width of the cached latents."""
    extra_layers: int = 0
    """Layers after the last, which predict several tokens and are not layers of the model."""
    mtp: MTPConfig | None = None
    """The first of these layers, if the checkpoint has it."""
    is_bidirectional: bool = False
    """True if each token attends to those after it too. The model then makes vectors, and keeps no KV."""
    encoder: EncoderConfig | None = None
    """Properties of an encoder of the BERT family."""
    layer_sizes: tuple[LayerSizes, ...] = ()
    """Sizes of each layer where they differ; `num_kv_heads` and `head_dim` then are those of full
    attention."""
    per_layer_width: int = 0
    """Width of the embedding that each layer has of its own; 0: none."""
    per_layer_vocab: int = 0
    """Tokens that these embeddings have rows for."""
    altup: AltUpConfig | None = None
    shared: SharedBlocksConfig | None = None
    vision: VisionConfig | None = None
    """Vision tower, if it is one that is known."""
    image_problem: str = ""
    """Reason why there is none."""
    position_rows: int = 0
    """Rows of the table of learned positions, which are added to embeddings; 0: there is none."""

    @property
    def rope(self) -> RopeConfig:
        return self.ropes[0]

    @property
    def short_context(self) -> int:
        """Return `RopeConfig.short_context` of the model. Encoders have the factors of the served context."""
        return 0 if self.is_bidirectional else max(rope.short_context for rope in self.ropes)

    @property
    def rope_width(self) -> int:
        """Width of the heads that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope

    def query_rope(self, rope: int) -> int:
        """Return the index of the RoPE of queries where that of keys is `rope`."""
        variant = self.ropes[rope].query_variant
        return rope if variant is None else self.ropes.index(variant)

    def sizes_of(self, layer: int) -> LayerSizes:
        if not self.layer_sizes:  # asked a thousand times in a load, for which `replace` takes long
            return LayerSizes(
                kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                inner=self.intermediate_size,
                kv_source=layer,
                heads=self.num_heads,
                value_dim=self.head_dim,
            )
        found = self.layer_sizes[layer]
        heads, value_dim = found.heads or self.num_heads, found.value_dim or found.head_dim
        return replace(found, heads=heads, value_dim=value_dim)

    @property
    def sliding_heads(self) -> tuple[int, int] | None:
        """Return KV heads of sliding-window layers and their width, where other layers have others."""
        sliding = sliding_shape(self.windows, self.layer_sizes, (self.num_kv_heads, self.head_dim), None)
        return None if sliding is None else sliding.heads

    @property
    def cpu_part(self) -> str:
        """Return what of the model only CPUs run; empty: nothing."""
        if self.altup is not None:
            return "rows of several streams"
        return "" if self.sparse_index is None else "sparse attention"

    @property
    def sparse_index(self) -> IndexConfig | None:
        """Return the indexer of sparse attention; None: rows attend to all keys."""
        return None if self.latent is None else self.latent.index

    def layers_with(self, layers: range, *, state: bool) -> int:
        """Return how many of these layers have recurrent state, or else KV of their own."""
        if self.recurrent is not None:
            return sum((self.recurrent.layers if state else self.recurrent.attention)[i] for i in layers)
        return 0 if state else sum(self.sizes_of(layer).kv_source == layer for layer in layers)

    @property
    def mlp_layers(self) -> int:
        """Number of layers with an MLP, and no experts."""
        if self.shared is not None:
            return self.shared.blocks
        others = 0 if self.experts is None else self.experts.num_layers
        if self.block == "single" and self.recurrent is not None:
            others += sum(self.recurrent.layers) + sum(self.recurrent.attention)
        return self.num_layers - others

    def sliding_layers(self, layers: range) -> int:
        """Return how many of these layers have a sliding window and KV of their own."""
        own = [layer for layer in layers if self.sizes_of(layer).kv_source == layer]
        return sum(self.windows[layer] is not None for layer in own)

    @property
    def context_limit(self) -> int:
        """Longest sequence that the model supports, in tokens."""
        return self.rope.context_limit(self.max_position_embeddings)

    @property
    def default_context(self) -> int:
        """Default context in tokens. `dynamic` RoPE scaling changes all answers, so it is used on request
        only.
        """
        return self.max_position_embeddings if self.rope.rope_type == "dynamic" else self.context_limit

    @property
    def num_parameters(self) -> int:
        """Number of parameters to load; tied weights count once."""
        return count_parameters(self)

    @property
    def per_layer_row(self) -> int:
        """Numbers that a token reads from these embeddings."""
        return self.num_layers * self.per_layer_width

    def _other_inputs(self) -> tuple[tuple[str, int], ...]:
        """Return `ModelShape.other_inputs`."""
        layers = [self.sizes_of(layer) for layer in range(len(self.layer_sizes))]
        widths = {("a narrower attention", sizes.heads * sizes.value_dim) for sizes in layers}
        return tuple(sorted(widths | {("a smaller MLP", sizes.inner) for sizes in layers if sizes.has_mlp}))

    def shape(self, context: int | None = None) -> ModelShape:
        """Return the shape for the estimator. `context`: requested context; None for the default."""
        windows = [window for window in self.windows if window is not None]
        recurrent = None if self.recurrent is None else self.recurrent.shape(self.hidden_size)
        heads = self.num_kv_heads, self.head_dim
        return ModelShape(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            ffn=max((sizes.inner for sizes in self.layer_sizes), default=self.intermediate_size),
            vocab=self.vocab_size,
            tied=self.tie_word_embeddings,
            context_limit=self.default_context if context is None else self.context_limit,
            short_context=self.short_context,
            dtype=self.dtype,
            sliding_window=min(map(abs, windows), default=None),
            sliding_share=len(windows) / (recurrent.attention_layers or 1 if recurrent else self.num_layers),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm == "heads",
            norms_all_heads=self.qk_norm == "width" or self.has_sub_norms,
            exact_params=self.num_parameters,
            latent=None if self.latent is None else self.latent.shape(self.hidden_size, self.num_heads),
            shares_blocks=self.shared is not None,
            shares_selection=self.sparse_index is not None and not all(self.sparse_index.layers),
            other_heads=tuple(sorted({each.heads for each in self.layer_sizes} - {0, self.num_heads})),
            fits_float16=self.fits_float16,
            quant=self.quant,
            stored=None if self.stored is None else self.stored.label,
            blocks=self.stored.sizes if isinstance(self.stored, GgufFormat) else None,
            wide_params=self.wide_params,
            experts=None if self.experts is None else self.experts.shape(),
            recurrent=recurrent,
            mlp_layers=self.mlp_layers if self.block in {"single", "shared"} else None,
            is_gated=self.activation not in UNGATED,
            sliding=sliding_shape(self.windows, self.layer_sizes, heads, recurrent),
            has_attention=tuple(each.has_attention for each in self.layer_sizes),
            linear_params=count_layer_params(self) if self.layer_sizes else None,
            other_inputs=self._other_inputs(),
            looked_up_params=self.per_layer_vocab * self.per_layer_row,
            looked_up_width=self.per_layer_row,
            is_bidirectional=self.is_bidirectional,
            vision=None if self.vision is None else vision_shape(self.vision),
            image_problem=self.image_problem,
            mtp=None if self.mtp is None else mtp_shape(self),
        )


def parse_config(path: Path | str) -> ModelConfig:
    """Read `path`/config.json. Raises ModelError, or UnsupportedArchitecture with the supported ones."""
    file = Path(path) / "config.json"
    return parse_fields(Fields(read_json(file), str(file)), Path(path))


def parse_fields(fields: Fields, path: Path) -> ModelConfig:
    """Do as `parse_config` with the content of config.json; `path` has the weights."""
    vision, image_problem = None, why_no_tower(fields)
    if architecture_of(fields).is_nested:
        vision, image_problem = find_vision(Path(path))
    kind, fields = language_model(fields)
    fields = kind.complete(fields)
    kind = replace(kind, **kind.variant(fields))
    activation = kind.read_activation(fields)
    refuse_unsupported(fields, kind)
    sizes = kind.read_sizes(fields)
    is_bidirectional = kind.encoder is not None or attends_both_ways(fields)
    head = not is_bidirectional and has_head(fields, path)
    encoder = None if kind.encoder is None else kind.encoder(fields)
    if is_bidirectional and (encoder is None or encoder.head is None):
        read_vectors(path, sizes.hidden)  # raises for a declaration that cannot be followed
    bias = kind.attention_bias and fields.flag("attention_bias", default=False)
    scales = kind.scales(fields)
    latent = kind.latent(fields)
    ropes, layer_ropes = _read_ropes(fields, kind, sizes, latent)
    stored = stored_format(fields, path)
    if encoder is not None and stored is not None and not isinstance(stored, GgufFormat):
        raise fields.error("quantized checkpoints of encoders are not read: take another, with --quant int8")
    experts = kind.experts(fields, sizes.layers)
    per_layer_width, per_layer_vocab = kind.per_layer(fields)
    return ModelConfig(
        **kind.traits(),
        activation=activation,
        dtype=checkpoint_dtype(fields),
        vocab_size=fields.integer("vocab_size", most=16 * MAX_WIDTH),
        hidden_size=sizes.hidden,
        intermediate_size=fields.integer("intermediate_size", most=16 * MAX_WIDTH),
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.positions,
        rms_norm_eps=norm_eps(fields) / scales.residual**2,
        post_norm_eps=fields.optional_number("post_norm_eps"),
        tie_word_embeddings=not head or (not kind.never_ties and has_tied_head(fields, path)),
        has_head=head,
        qkv_bias=bias or kind.qkv_bias,
        o_bias=kind.attention_bias and fields.flag("attention_out_bias", default=bias),
        mlp_bias=kind.mlp_bias and fields.flag("mlp_bias", default=False),
        qk_norm=kind.qk_norm if kind.has_qk_norm(fields) else None,
        recurrent_block=kind.recurrent_block or kind.block,
        windows=kind.windows(fields, sizes.layers),
        ropes=ropes,
        layer_ropes=layer_ropes,
        scales=scales,
        quant=running_format(stored, has_experts=experts is not None),
        stored=stored,
        wide_params=0 if stored is None else count_unquantized_params(path, stored),
        experts=experts,
        recurrent=kind.recurrence(fields, sizes.layers),
        has_head_gate=bool(kind.head_gate_flag) and fields.flag(kind.head_gate_flag, default=True),
        head_bias=bool(kind.head_bias_flag) and fields.flag(kind.head_bias_flag, default=False),
        latent=latent,
        extra_layers=int(fields.number("num_nextn_predict_layers", 0)),
        mtp=None if isinstance(stored, GgufFormat) else find_mtp(kind.mtp, fields, path, sizes.layers),
        is_bidirectional=is_bidirectional,
        encoder=encoder,
        layer_sizes=kind.layer_sizes(fields, sizes.layers),
        per_layer_width=per_layer_width,
        per_layer_vocab=per_layer_vocab,
        altup=kind.altup(fields),
        shared=kind.shared(fields),
        vision=vision,
        image_problem=image_problem,
        position_rows=kind.position_rows(fields),
    )


def _read_ropes(
    fields: Fields, kind: Architecture, sizes: CommonSizes, latent: LatentConfig | None
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """Return the RoPE variants, those of queries alone last, and the index of each layer's."""
    width = latent.rope if latent else sizes.head_dim
    ropes, layer_ropes = kind.ropes(fields, width, sizes.positions, sizes.layers)
    ropes += tuple(variant for rope in ropes if (variant := rope.query_variant) is not None)
    if len({rope.short_context for rope in ropes} - {0}) > 1:
        raise fields.error("original_max_position_embeddings must be the same in all RoPE parameters")
    longest = max(rope.context_limit(sizes.positions) for rope in ropes)
    if longest > MAX_POSITIONS:
        raise fields.error(
            f"a context of {longest} tokens, after scaling, is beyond anything known ({MAX_POSITIONS})"
        )
    return ropes, layer_ropes


def stored_format(fields: Fields, directory: Path) -> WeightFormat | None:
    """Return the format of a quantized checkpoint; None if it is not quantized. Raises ModelError, also where
    its files do not hold what the format needs.
    """
    try:
        form = find_weight_format(fields.raw, directory)
    except NotReadable as error:
        raise fields.error(
            f"quantization_config: {error}, which cannot be read; known are {', '.join(READERS)}, see "
            "docs/models.md: use another checkpoint, or the bfloat16 one with --quant or `llmbox quantize`"
        ) from None
    if form is not None:
        try:
            entries = list_tensors(directory)
        except ModelError:  # loading says why
            return form
        check_tensors(form, split_experts(form, entries))
    return form
