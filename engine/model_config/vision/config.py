"""Vision part of a model as data: its tower, its processor, and what the engine and the API need to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
PositionTable = Literal["", "whole", "buckets", "bilinear", "antialiased", "axes", "places"]
"""Learned positions of patches: none; a row for each patch; a square of rows, of which each patch takes the
one at its fraction of the picture, or a bilinear mean, or one with antialiasing; or a row for its column and
one for its row, from two tables, stored one after the other or side by side."""
VisionRope = Literal["", "axial", "alternating"]
"""RoPE of rows and columns: none; the first half of the frequencies for rows; every other one."""
ProjectorKind = Literal[
    "mistral3", "llava", "pixel_shuffle", "gemma3", "lfm2_vl", "merger", "lfm3_vl", "glm_ocr",
    "gemma4", "gemma4_unified",
]  # fmt: skip
ResizeKind = Literal["longest_edge", "tiles", "square", "pixels", "glm", "lfm2", "gemma4"]
"""Rule for the size of a picture (`shape.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """Names of a tower's tensors without `.weight` and `.bias`, and without `model.` before them.

    Those from `norm1` on stand below `layers` and the number of a layer.
    """

    patch: str
    layers: str
    patch_norm: str = ""
    embedded_norm: str = ""
    """Norms before and after `patch`, where there are such."""
    table: str = ""
    pre_norm: str = ""
    post_norm: str = ""
    norm1: str = "norm1"
    norm2: str = "norm2"
    after_attention: str = ""
    after_mlp: str = ""
    """Norms of the results of attention and MLP, where there are such."""
    query: str = "attn.q"
    key: str = "attn.k"
    value: str = "attn.v"
    stacked: str = ""
    """Tensor with query, key and value, in checkpoints that have them as one."""
    output: str = "attn.proj"
    query_norm: str = ""
    key_norm: str = ""
    gate: str = ""
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    conv: str = ""
    """Module of a layer with `in_proj`, `spatial_conv` and `out_proj` in place of attention."""
    projector: tuple[str, ...]
    """Norm, first and second linear of the projector, from the top; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """Sizes and rules of a vision tower and its projector."""

    names: TowerNames
    hidden_size: int
    intermediate_size: int
    num_layers: int
    """Layers that are run; the checkpoint may have more (`stored_layers`)."""
    stored_layers: int
    num_heads: int
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as of queries."""
    head_dim: int
    patch_size: int
    frames: int = 1
    """Frames of a patch: a picture is repeated as often."""
    channels_last: bool = False
    """True if the numbers of a patch are in the order row, column, color."""
    activation: VisionActivation
    eps: float = 1e-6
    is_rms: bool = False
    """True for RMS norms, False for LayerNorms with biases."""
    attention_bias: bool = True
    mlp_bias: bool = True
    patch_bias: bool = True
    scales_queries: bool = True
    """False if attention's scores are not divided by the root of `head_dim`."""
    table: PositionTable = ""
    table_rows: int = 0
    rope: VisionRope = ""
    rope_theta: float = 10000.0
    windows: int = 0
    """Side of an attention window in merged patches; 0: all patches of a picture see each other."""
    full_layers: tuple[int, ...] = ()
    """Layers without windows."""
    conv_layers: tuple[int, ...] = ()
    """Layers with a gated convolution over rows and columns in place of attention (LFM3-VL)."""
    conv_width: int = 0
    """Side of the square of patches that it reads, an odd number."""
    merge: int = 1
    """Side of a square of patches that becomes one embedding."""
    projector: ProjectorKind
    projector_size: int = 0
    """Width between the linears of the projector."""
    projector_bias: bool = False
    projector_norm: bool = True
    projector_eps: float = 1e-6
    projector_activation: VisionActivation = "gelu"
    deepstack: tuple[int, ...] = ()
    """Layers whose results are merged for the first layers of the language model."""
    clips: bool = False
    """True if linears of layers bound their inputs and results (Gemma 4)."""
    standardizes: bool = False
    """True if pooled patches are shifted and scaled (Gemma 4)."""

    @property
    def by_merge(self) -> bool:
        """True if patches that are merged stand next to each other."""
        return self.projector in {"merger", "lfm3_vl", "glm_ocr"}

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        kv_heads = self.kv_heads or self.num_heads
        return self.num_heads, kv_heads, kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageProcessorConfig:
    """Rules of the image processor: size, tiles, resampling, and the normalization of pixels."""

    kind: ResizeKind
    unit: int
    """Multiple of all sizes: the side of an embedding's pixels."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale: float = 1 / 255
    resample: int
    """Filter by Pillow's number: 0 nearest, 1 Lanczos, 2 bilinear, 3 bicubic."""
    longest: int = 0
    """Longest edge."""
    tile: int = 0
    """Side of a tile, or of the whole picture."""
    splits: bool = False
    """True if large pictures are cut into tiles."""
    least: int = 0
    most: int = 0
    """Limits of the pixels of a picture."""
    tile_counts: tuple[int, int] = (1, 1)
    """Least and most tiles."""
    thumbnail: bool = False
    """True if the whole picture comes after its tiles."""
    tolerance: float = 1.0
    """Factor of `most` from which on a picture is cut into tiles; ratio of its edges for crops."""
    crop: int = 0
    """Least edge of the crops that follow the whole picture (Gemma 3's pan and scan); 0: none follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Vision part of a model. `tower` and `processor` are for the modules of towers and pictures alone."""

    family: str
    """Name of the family in docs and errors."""
    image_token_id: int
    """Token id of a row that takes an embedding of the tower."""
    placeholder: str
    """Text that the chat template writes where a picture stands; `ImageLayout.text` replaces it."""
    image_text: str
    """Text of `image_token_id`."""
    start: str = ""
    end: str = ""
    """Texts before and after the image tokens of a picture, where the chat template does not write them."""
    hidden_size: int
    """Width of an embedding, that of the language model."""
    pad_id: int = 0
    """Token id that stands for such a row where layers have embeddings of their own."""
    mrope_section: tuple[int, ...] = ()
    """Frequencies of time, height and width (M-RoPE); empty: rows of a picture have positions as text."""
    mrope_interleaved: bool = False
    """True if the frequencies of the three axes alternate, and do not follow each other."""
    is_bidirectional: bool = False
    """True if the rows of a picture attend to each other in both directions."""
    bidirectional_windows: bool = False
    """True if they do so in layers with a sliding window alone (Gemma 4)."""
    tower: TowerConfig
    processor: ImageProcessorConfig
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of all tensors of tower and projector, by their names without `model.`."""

    @property
    def deepstack_levels(self) -> int:
        """Further embeddings of each row, added after the first layers of the language model."""
        return len(self.tower.deepstack)

    @property
    def num_params(self) -> int:
        """Parameters of tower and projector."""
        total = 0
        for shape in self.tensors.values():
            size = 1
            for width in shape:
                size *= width
            total += size
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Tiles, rows and text of a picture of a given size."""

    tiles: tuple[tuple[int, int], ...]
    """(height, width) of each tile in pixels, in the order in which the tower reads them."""
    num_rows: int
    """Rows with embeddings: so many image tokens are in `text`."""
    text: str
    """Text that replaces the placeholder, with one image token for each row."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of embeddings, for M-RoPE."""
    tile_grid: tuple[int, int] = (0, 0)
    """Rows and columns of tiles; zeros: one tile has all of the picture."""
    pictures: int = 1
    """Number of equal shares of the tiles, each of which is a picture of its own to the engine."""
