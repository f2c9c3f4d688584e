"""Sizes of a decoder-only transformer that determine its memory and speed."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from llmbox.kernels.quant_formats import BlockSizes, Quant

from ..config import Dtype
from .vision.config import NO_TOWER

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALED_KV = frozenset({"int8", "fp8"})
"""KV dtypes of one byte per value, with a float32 scale per token and KV head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Sizes of a mixture of experts, which replaces the MLP of some layers."""

    count: int
    per_token: int
    inner: int
    """Intermediate size of each expert, as `ModelShape.ffn`."""
    layers: int
    """Number of layers with experts."""
    shared: int = 0
    """Intermediate size of the expert that all tokens pass through."""
    latent: int = 0
    """Width of the rows that experts read and write; 0: the hidden size."""
    ranks: int = 1
    """Number of ranks among which the experts of a layer are divided, whole."""
    redundant: int = 0
    """Copies of experts of a layer that these ranks have more."""

    @property
    def held(self) -> int:
        """Most experts of a layer that a rank has, copies included."""
        return -(-(self.count + self.redundant) // self.ranks)

    def read(self, rows: int) -> float:
        """Return the expected number of experts of a layer on a rank that `rows` tokens select, if all are
        equally likely. Of an expert's copies one is read.
        """
        return -(-self.count // self.ranks) * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """Sizes of recurrent layers, which have a state of fixed size for each sequence in place of KV."""

    is_recurrent: tuple[bool, ...]
    """True for each recurrent layer of the model."""
    has_kv: tuple[bool, ...]
    """True for each layer with attention: a layer may have both, or neither."""
    layers: int
    """Number of recurrent layers."""
    attention_layers: int
    """Number of layers with KV."""
    layer_params: int
    """Parameters of a recurrent layer, without norms and MLP."""
    layer_bytes: int
    """Bytes of the state of one sequence in one layer."""
    divisible: tuple[tuple[str, int], ...]
    """(name, number) of what the ranks of a stage share equally."""

    @property
    def slot_bytes(self) -> int:
        return self.layers * self.layer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Parameters of one layer's latent attention (MLA), in place of query, key, value and output linears."""

    whole: int
    """Parameters that each rank holds."""
    split: int
    """Parameters that the ranks of a stage share."""
    absorbed: int
    """Parameters that they share too, and that no format quantizes."""
    inner: int
    """Inputs of the output linear."""

    @property
    def params(self) -> int:
        return self.whole + self.split + self.absorbed


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingShape:
    """Layers with a sliding window, beside which others may see the whole context. Counted are those with
    keys and values of their own.
    """

    is_sliding: tuple[bool, ...]
    """True for each layer of the model with a window."""
    layers: int
    full_layers: int
    """Number of the others, at least 1."""
    window: int
    """Largest window in tokens."""
    heads: tuple[int, int] | None = None
    """KV heads and their width, where they differ from those of the other layers."""
    sharing: int = 0
    """Layers of either kind that read keys and values of others; they are not counted above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """Sizes of a vision tower and of its embeddings."""

    params: int
    """Parameters of tower and projector, which stay unquantized."""
    row: int
    """Numbers of the embeddings of one row."""
    patch_numbers: int
    """Numbers of a layer's activations for each row: input and result, queries, keys and values, and a copy
    of the latter two; or what a convolution has of the row in float32."""
    row_bytes: int
    """Bytes for each row that do not depend on the dtype: tables of RoPE, and two copies of its pixels."""
    tower_rows: int
    """Rows that the tower computes at once: of the largest tile or image, at most `IMAGE_ROWS`."""
    slice_numbers: int
    """Numbers of a layer's activations that do not grow with the image: norms and inner rows of a slice."""
    whole_rows: int = 0
    """Most rows of an image where a step computes all of one, beyond its budget if need be; 0 otherwise."""
    usual_rows: int = 0
    """Rows of an image of `USUAL_SIDE` x `USUAL_SIDE` pixels."""

    def share(self, ranks: int) -> "VisionShape":
        """Return what each of the ranks in one memory counts of the tower, which the first of them has."""
        numbers = ("params", "row", "patch_numbers", "row_bytes", "slice_numbers")
        return replace(self, **{name: -(-getattr(self, name) // ranks) for name in numbers})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes from config.json; a gated MLP (three matrices of hidden x ffn) is assumed."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """True if embedding and output head are one matrix."""
    context_limit: int
    """Longest sequence that the model supports in tokens, RoPE scaling included."""
    short_context: int = 0
    """Longest sequence with the short factors of LongRoPE; 0: factors do not change with the length."""
    dtype: Dtype = "bfloat16"
    """Dtype of the checkpoint."""
    sliding_window: int | None = None
    sliding_share: float = 1.0
    """Fraction of layers with the sliding window; the others have full attention."""
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    """True if QK-norm spans all heads together, so that the model cannot be tensor-parallel."""
    table_rows: int | None = None
    """Rows of embedding and head on a rank, if it holds fewer than `vocab`."""
    no_head: bool = False
    """True if the one table of a rank is the input embedding, and the output head is on another rank."""
    quant: str | None = None
    """Kernels' format for the numbers of a quantized checkpoint."""
    stored: str | None = None
    """Name of the format in which such a checkpoint is stored."""
    blocks: BlockSizes | None = None
    """Sizes of weights that keep the blocks of a GGUF file."""
    wide_params: int = 0
    """Parameters of unquantized linears in such a checkpoint."""
    exact_params: int | None = None
    """Number of parameters if known; None uses the closed form."""
    experts: ExpertShape | None = None
    mlp_layers: int | None = None
    """Number of layers with an MLP; None: all that have no experts."""
    is_gated: bool = True
    """True if MLPs and experts have gates: three matrices, else two."""
    shares_selection: bool = False
    """True if layers attend to keys that an earlier one selected."""
    shares_blocks: bool = False
    """True if layers share attention and MLPs, which read the embedding too."""
    latent: LatentShape | None = None
    """Latent attention; heads and `head_dim` are then those of the cached latents."""
    fits_float16: bool = True
    """True if the outputs of layers stay within the range of float16."""
    recurrent: RecurrentShape | None = None
    sliding: SlidingShape | None = None
    has_attention: tuple[bool, ...] = ()
    """True for each layer with attention, where some have none and nothing in its place; empty: all have."""
    is_bidirectional: bool = False
    """True for a model that keeps no keys and values: it sees a whole text at once, and makes a vector."""
    linear_params: int | None = None
    """Parameters of attention and MLPs of all layers, where layers differ; None: the closed form."""
    other_heads: tuple[int, ...] = ()
    """Query heads of layers that have another number of them."""
    looked_up_params: int = 0
    """Parameters of embeddings of each layer, of which a token reads a row."""
    looked_up_width: int = 0
    """Numbers of such a row."""
    other_inputs: tuple[tuple[str, int], ...] = ()
    """(name, inputs) of linears that ranks share by inputs, of layers that differ from the largest."""
    vision: VisionShape | None = None
    """Vision tower, if images are read; `params` does not count it."""
    image_problem: str = NO_TOWER
    """Reason why there is none."""
    mtp: "ModelShape | None" = None
    """Layer for multi-token prediction, not counted above."""

    @property
    def kv_layers(self) -> int:
        """Number of layers with keys and values of their own."""
        if self.sliding is not None and (self.sliding.heads or self.sliding.sharing):
            return self.sliding.layers + self.sliding.full_layers
        layers = sum(self.has_attention) or self.layers
        return layers if self.recurrent is None else self.recurrent.attention_layers

    @property
    def slot_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence."""
        return 0 if self.recurrent is None else self.recurrent.slot_bytes

    @property
    def has_layer_ties(self) -> bool:
        """True if layers need more of others than their output, so that they cannot be on different
        stages.
        """
        shares_kv = self.sliding is not None and self.sliding.sharing > 0
        return self.looked_up_params > 0 or shares_kv or self.shares_selection or self.shares_blocks

    def seen(self, context: float) -> float:
        """Return the mean number of visible tokens over the layers, at `context` tokens."""
        if self.sliding_window is None:
            return context
        inside = min(context, self.sliding_window)
        return self.sliding_share * inside + (1 - self.sliding_share) * context

    @property
    def params(self) -> int:
        if self.exact_params is not None:
            return self.exact_params
        tables = self.table_params * (1 if self.tied else 2) + self.looked_up_params
        return tables + self.layers_params + self.hidden

    @property
    def table_params(self) -> int:
        """Number of parameters of the input embedding, or of the head."""
        return (self.table_rows or self.vocab) * self.hidden

    @property
    def matmul_params(self) -> int:
        """Number of parameters that tokens are multiplied with: all but tables that are only looked up."""
        multiplied = self.params - self.looked_up_params
        return multiplied if self.tied and not self.is_bidirectional else multiplied - self.table_params

    @property
    def active_params(self) -> int:
        """Number of `matmul_params` that one token is multiplied with."""
        return self.matmul_params - self.unread_params(1)

    def unread_params(self, rows: int) -> int:
        """Return the expected parameters of experts that none of `rows` tokens selects."""
        if self.experts is None:
            return 0
        unread = self.experts.held - self.experts.read(rows)
        width = self.experts.latent or self.hidden
        return int(self.experts.layers * unread * self.matrices * width * self.experts.inner)

    @property
    def routed_params(self) -> int:
        """Number of parameters of all experts that routers choose."""
        if self.experts is None:
            return 0
        each = self.matrices * (self.experts.latent or self.hidden) * self.experts.inner
        return self.experts.layers * self.experts.held * each

    def without_routed(self) -> "ModelShape":
        """Return the sizes of all but the experts that routers choose."""
        if self.experts is None:
            return self
        experts, params = replace(self.experts, inner=0), self.params - self.routed_params
        rest = replace(self, experts=experts, exact_params=params)
        return replace(rest, wide_params=min(self.wide_params, rest.matmul_params - rest.table_params))

    @property
    def matrices(self) -> int:
        """Number of matrices of an MLP."""
        return 3 if self.is_gated else 2

    @property
    def inner_rows(self) -> int:
        """Sum of the intermediate sizes of all MLPs and experts."""
        sparse, inner = 0, 0
        if self.experts is not None:
            sparse, inner = self.experts.layers, self.experts.held * self.experts.inner + self.experts.shared
        dense = self.layers - sparse if self.mlp_layers is None else self.mlp_layers
        return dense * self.ffn + sparse * inner

    @property
    def router_params(self) -> int:
        """Number of parameters of all routers and absorbed linears, which no format quantizes."""
        routers = self.experts.layers * self.experts.count * self.hidden if self.experts else 0
        return routers + (self.kv_layers * self.latent.absorbed if self.latent else 0)

    @property
    def layers_params(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv)  # q, o and k, v
        if self.latent is not None:
            attention = self.latent.whole + self.latent.split
        bias = q + 2 * kv if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.linear_params is not None:
            return self.layers * (bias + norms) + self.linear_params
        mlps = self.matrices * self.hidden * self.inner_rows + self.router_params
        if self.experts is not None and self.experts.latent:
            latent, inner = self.experts.latent, self.experts.held * self.experts.inner
            narrower = self.matrices * inner * (latent - self.hidden)
            mlps += self.experts.layers * (narrower + 2 * self.hidden * latent)
        mixers = self.kv_layers * (attention + bias)
        if self.recurrent is not None:
            mixers += self.recurrent.layers * self.recurrent.layer_params
        return mixers + self.layers * norms + mlps

    def kv_bytes_per_token(
        self,
        dtype: str,
        pad: Callable[[int], int] = int,
        part: Literal["all", "full", "sliding"] = "all",
    ) -> int:
        """Return the bytes of K and V of all layers, of those that see the whole context, or of the others.

        `pad`: width of heads as kernels store them.
        """
        if self.is_bidirectional:
            return 0

        def size(layers: int, heads: int, width: int) -> int:
            head = pad(width) + 4 if dtype in SCALED_KV else pad(width) * DTYPE_BYTES[dtype]
            return 2 * layers * heads * head

        sliding, heads = self.sliding, (self.kv_heads, self.head_dim)
        if sliding is None or (part == "all" and sliding.heads is None):
            return size(self.kv_layers, *heads)
        full, windowed = size(sliding.full_layers, *heads), size(sliding.layers, *(sliding.heads or heads))
        return {"all": full + windowed, "full": full, "sliding": windowed}[part]


_FINE = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp\.down_proj|feed_forward\.w2|.+\.experts\.\d+\.(?:down_proj|w2))"
)


def is_fine(name: str, layers: int) -> bool:
    """Return whether a mixed-precision format gives this linear as many bits as the output head.

    These are `down_proj` of the first and the last eighth of the layers, and of every third layer between
    them, as in llama.cpp's Q4_K_M. In the built-in model they gain most from more bits
    (docs/quantization.md). `name`: its name in a checkpoint without `.weight`.
    """
    found = _FINE.fullmatch(name)
    return found is not None and _has_more_bits(int(found[1]), layers)


def layers_bytes(shape: ModelShape, quant: Quant, wide: int, rows: int | None = None) -> int:
    """Return the bytes of all quantized and unquantized linears except the output head. `wide`: bytes of an
    unquantized parameter.

    `rows`: count only the experts that so many tokens select.
    """
    head = 0 if shape.is_bidirectional else shape.table_params
    params = shape.matmul_params - head - (shape.unread_params(rows) if rows else 0)
    fine = 0
    if quant.is_mixed:
        layers = sum(_has_more_bits(layer, shape.layers) for layer in range(shape.layers))
        read = 1.0
        if rows and shape.experts:
            read = shape.experts.read(rows) / shape.experts.held
        fine = int(layers * shape.hidden * shape.inner_rows * read / shape.layers)
    kept = shape.wide_params + shape.router_params
    each = shape.blocks.layers if quant.is_gguf and shape.blocks else quant.bytes_per_weight
    return int((params - fine - kept) * each + fine * quant.head.bytes_per_weight + kept * wide)


def head_bytes(shape: ModelShape, quant: Quant, wide: int) -> float:
    """Return the bytes of one weight of the output head, or of the table of a rank without one."""
    if quant.is_gguf and shape.blocks:
        return shape.blocks.table if shape.no_head else shape.blocks.head
    return wide if shape.no_head else quant.head_bytes(wide)


def _has_more_bits(layer: int, layers: int) -> bool:
    edge = max(1, layers // 8)
    return layer < edge or layer >= layers - edge or (layer - edge) % 3 == 2
