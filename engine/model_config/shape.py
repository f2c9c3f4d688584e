"""The sizes of a decoder-only transformer that its memory and speed follow from. No torch."""

from dataclasses import dataclass

from ..config import Dtype

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALED_KV = frozenset({"int8", "fp8"})
"""KV caches of one byte a number, and a float32 scale for each token and kv head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Of a mixture of experts, in the place of the MLP of some layers."""

    count: int
    per_token: int
    inner: int
    """As `ModelShape.ffn`, of each expert."""
    layers: int
    """That have experts."""

    def read(self, rows: int) -> float:
        """How many experts of a layer so many rows choose together, were all of them equally likely."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Numbers from config.json; a gated MLP (three matrices of hidden x ffn) is assumed."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    """Input and output embedding are one matrix."""
    context_limit: int
    """Longest sequence the model was made for, RoPE scaling included."""
    dtype: Dtype = "bfloat16"
    """Of the checkpoint."""
    sliding_window: int | None = None
    sliding_share: float = 1.0
    """Of layers, where there is a window: the others see everything."""
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    """Of queries, and of keys, together: no rank may have a part of them."""
    table_rows: int | None = None
    """Of the vocabulary's tables, where a rank holds fewer than `vocab`."""
    no_head: bool = False
    """The one table that a rank holds is for input alone: the output head is on another."""
    quant: str | None = None
    """Format of the checkpoint, where it holds rounded weights."""
    wide_params: int = 0
    """Of linears in layers that such a checkpoint keeps wide."""
    exact_params: int | None = None
    """Counted from the safetensors headers, where those are at hand; else the closed form is used."""
    experts: ExpertShape | None = None
    fits_float16: bool = True
    """Whether what its layers give stays within float16's range."""

    def seen(self, context: float) -> float:
        """Of so many tokens, what a layer sees on average."""
        if self.sliding_window is None:
            return context
        inside = min(context, self.sliding_window)
        return self.sliding_share * inside + (1 - self.sliding_share) * context

    @property
    def params(self) -> int:
        if self.exact_params is not None:
            return self.exact_params
        return self.table_params * (1 if self.tied else 2) + self.layers_params + self.hidden

    @property
    def table_params(self) -> int:
        """Of the input embedding, or of the head."""
        return (self.table_rows or self.vocab) * self.hidden

    @property
    def matmul_params(self) -> int:
        """Parameters that tokens are multiplied with: all but a separate input embedding."""
        return self.params if self.tied else self.params - self.table_params

    @property
    def active_params(self) -> int:
        """Of those, what one token is multiplied with."""
        return self.matmul_params - self.unread_params(1)

    def unread_params(self, rows: int) -> int:
        """Of experts that none of so many rows chooses."""
        if self.experts is None:
            return 0
        unread = self.experts.count - self.experts.read(rows)
        return int(self.experts.layers * unread * 3 * self.hidden * self.experts.inner)

    @property
    def inner_rows(self) -> int:
        """Of the MLPs of all layers, or of all their experts."""
        if self.experts is None:
            return self.layers * self.ffn
        sparse = self.experts.layers
        return (self.layers - sparse) * self.ffn + sparse * self.experts.count * self.experts.inner

    @property
    def router_params(self) -> int:
        """Which stay wide in every format."""
        return self.experts.layers * self.experts.count * self.hidden if self.experts else 0

    @property
    def layers_params(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv)  # q, o and k, v
        bias = q + 2 * kv if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        mlps = 3 * self.hidden * self.inner_rows + self.router_params
        return self.layers * (attention + bias + norms) + mlps

    def kv_bytes_per_token(self, dtype: str, width: int | None = None) -> int:
        """K and V of all layers. A sliding window does not shrink it: a request keeps all its blocks.

        `width`: numbers that kernels keep for a head, where they pad it.
        """
        numbers = width or self.head_dim
        head = numbers + 4 if dtype in SCALED_KV else numbers * DTYPE_BYTES[dtype]
        return 2 * self.layers * self.kv_heads * head
