"""Vision part of a model as data: its tower, its processor, and what the engine and the API need to know."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu2"]
PositionTable = Literal[
    "", "whole", "buckets", "bilinear", "bilinear_edges", "bicubic", "bicubic_square", "antialiased",
    "axes", "places", "nearest", "cropped",
]  # fmt: skip
"""Learned positions of patches: none; a row for each patch; a square of rows, of which each patch takes the
one at its fraction of the image, or a bilinear mean (corners or edges aligned), a bicubic one (stored as
rows, or as a square), or one with antialiasing; or a row for its column and one for its row, from two tables,
stored one after the other or side by side. The last is as the third, with fractions that are divided, not
multiplied by an inverse. `cropped`: as of a square that the image fits in, edges aligned."""
VisionRope = Literal["", "axial", "alternating", "pairs", "alternating_pairs"]
"""RoPE of rows and columns: none; the first half of the frequencies for rows; every other one; those of
neighboring numbers, the first half for columns, counted from 1 as the class embedding has position 0; or
those of neighboring numbers, every other one for columns.
"""
ProjectorKind = Literal[
    "mistral3", "llava", "pixel_shuffle", "pixel_shuffle_mlp", "llama4", "gemma3", "merger", "lfm3_vl", "glm",
    "gemma4", "gemma4_unified", "minicpmv", "pixel_shuffle_gated",
    "visual_table",
]  # fmt: skip
ResizeKind = Literal[
    "longest_edge", "tiles", "canvas", "padded_canvas", "square", "center_crop", "pixels", "glm", "lfm2",
    "gemma4", "slices", "anyres", "whole_units", "fitted_canvas", "padded_units",
    "covered_canvas", "patch_grid",
]  # fmt: skip
"""Rule for the size of an image (`layout.py`)."""

LOW_DETAIL: Final = 512
"""Edge of an image with `"detail": "low"`, in pixels, where its processor does not fix one."""


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
    class_embedding: str = ""
    """Embedding of a row before the patches, which the projector leaves out (CLS)."""
    table: str = ""
    """Whole name of the learned positions."""
    pre_norm: str = ""
    post_norm: str = ""
    norms: tuple[str, ...] = ("norm1", "norm2")
    """Norms before attention and before the MLP, and maybe those of their results."""
    scales: tuple[str, ...] = ()
    """Factors of the results of attention and MLP (LayerScale), where there are such."""
    may_lack_scales: bool = False
    """True if files may leave these out, which are 1 then."""
    qkv: tuple[str, ...] = ("attn.qkv",)
    """Query, key and value, or one tensor with all three."""
    qk_norms: tuple[str, ...] = ()
    output: str = "attn.proj"
    mlp: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")
    """Up and down, with the gate before them where there is one."""
    window_merger: str = ""
    """Module of the merger between layers, where there is one."""
    conv: str = ""
    """Module of a layer with `in_proj`, `spatial_conv` and `out_proj` in place of attention."""
    newline: str = ""
    """Embedding that ends each line of an image, where it is a tensor."""
    projector: tuple[str, ...]
    """Norm, first and second linear of the projector, maybe a third; empty where there is none."""
    deepstack: str = "visual.deepstack_merger_list"
    """Module of the projectors of deepstack levels, whose parts are named as those of the projector."""

    def projector_of(self, level: int) -> tuple[str, ...]:
        """Return the names of the projector of a deepstack level, from 1; 0: of the last layer."""
        parts = (name.removeprefix("visual.merger.") for name in self.projector)
        return tuple(f"{self.deepstack}.{level - 1}.{part}" for part in parts) if level else self.projector


def projections(module: str) -> tuple[str, ...]:
    """Return the names of the linears of query, key and value in a module."""
    return tuple(f"{module}.{part}_proj" for part in "qkv")


def siglip_names(at: str, *projector: str) -> TowerNames:
    """Return the names of SigLIP, which CLIP shares, below the prefix `at`."""
    return TowerNames(
        patch=f"{at}embeddings.patch_embedding",
        layers=f"{at}encoder.layers",
        table=f"{at}embeddings.position_embedding.weight",
        post_norm=f"{at}post_layernorm",
        norms=("layer_norm1", "layer_norm2"),
        qkv=projections("self_attn"),
        output="self_attn.out_proj",
        projector=projector,
    )


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
    """Frames of a patch: an image is repeated as often."""
    channels_last: bool = False
    """True if the numbers of a patch are in the order row, column, color."""
    activation: VisionActivation
    eps: float = 1e-6
    is_rms: bool = False
    """True for RMS norms, False for LayerNorms with biases."""
    attention_bias: bool = True
    output_bias: bool = True
    """Bias of the linear after attention."""
    wide_norms: bool = False
    """True if queries and keys are normalized over all heads together, not each by itself."""
    mlp_bias: bool = True
    patch_bias: bool = True
    scales_queries: bool = True
    """False if attention's scores are not divided by the root of `head_dim`."""
    table: PositionTable = ""
    table_rows: int = 0
    """Learned positions, beside that of the class embedding."""
    class_rows: int = 1
    """Rows of the class embedding; several, with those of registers, have no positions (RADIO)."""
    class_is_last: bool = False
    """True if the class embedding has the last position of the table, not the first."""
    rope: VisionRope = ""
    rope_theta: float = 10000.0
    windows: int = 0
    """Side of an attention window in merged patches; 0: all patches of an image see each other."""
    full_layers: tuple[int, ...] = ()
    """Layers without windows."""
    conv_layers: tuple[int, ...] = ()
    """Layers with a gated convolution over rows and columns in place of attention (LFM3-VL)."""
    conv_width: int = 0
    """Side of the square of patches that it reads, an odd number."""
    merge: int = 1
    """Side of a square of patches that becomes one embedding."""
    window_layer: int = -1
    """Layer after which the patches of small windows attend to each other and become one (MiniCPM-V)."""
    window_merge: int = 1
    """Side of such a window."""
    projector: ProjectorKind
    projector_size: int = 0
    """Width between the linears of the projector."""
    merger_size: int = 0
    """Width of a merger's result where a third linear follows; 0: none does (HyperCLOVA X)."""
    projector_bias: bool = False
    projector_norm: bool = True
    projector_is_rms: bool = False
    projector_eps: float = 1e-6
    projector_activation: VisionActivation = "gelu"
    joined_layers: tuple[int, ...] = ()
    """Layers after which states are joined side by side for the projector; empty: the last one alone."""
    deepstack: tuple[int, ...] = ()
    """Layers whose results are merged for the first layers of the language model."""
    clips: bool = False
    """True if linears of layers bound their inputs and results (Gemma 4)."""
    standardizes: bool = False
    """True if pooled patches are shifted and scaled (Gemma 4)."""
    indicators: int = 0
    """Rows at the end of the table of visual tokens, for the places around tiles (Ovis2)."""

    @property
    def by_merge(self) -> bool:
        """True if patches that are merged stand next to each other."""
        return self.projector in {"merger", "lfm3_vl", "glm", "minicpmv"}

    @property
    def projected_size(self) -> int:
        """Numbers of a patch that the projector reads."""
        return self.hidden_size * max(1, len(self.joined_layers))

    @property
    def patches_per_row(self) -> int:
        """Patches of an embedding."""
        return (self.merge * self.window_merge) ** 2

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        kv_heads = self.kv_heads or self.num_heads
        return self.num_heads, kv_heads, kv_heads

    @property
    def class_positions(self) -> int:
        """Rows of the table for the class embedding."""
        return int(bool(self.names.class_embedding) and self.class_rows == 1)

    @property
    def qkv_rows(self) -> tuple[int, ...]:
        """Rows of each tensor of `names.qkv`."""
        rows = tuple(heads * self.head_dim for heads in self.head_counts)
        return rows if len(self.names.qkv) > 1 else (sum(rows),)


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
    """Side of a tile, or of the whole image."""
    splits: bool = False
    """True if large images are cut into tiles."""
    least: int = 0
    most: int = 0
    """Limits of the pixels of an image."""
    tile_counts: tuple[int, int] = (1, 1)
    """Least and most tiles."""
    thumbnail: bool = True
    """True if the whole image comes before or after its tiles."""
    tolerance: float = 1.0
    """Factor of `most` from which on an image is cut into tiles; ratio of its edges for crops."""
    canvases: tuple[tuple[int, int], ...] = ()
    """(height, width) of the canvases of tiles, one of which an image is padded to (LLaVA-NeXT)."""
    patch: int = 0
    """Side of a patch, where whole patches are counted (Kimi K2.5)."""
    kept_tiles: int = 0
    """Tiles that have as many patches as are kept of a larger canvas; 0: all are kept."""
    crop: int = 0
    """Least edge of the crops that follow the whole image (Gemma 3's pan and scan); 0: none follow."""

    def at_low_detail(self) -> "ImageProcessorConfig":
        """Return the rules for an image with `"detail": "low"`."""
        most = self.most and min(self.most, max(self.least, LOW_DETAIL**2, self.unit**2))
        longest = min(self.longest, LOW_DETAIL) if self.kind == "longest_edge" else self.longest
        return replace(self, splits=False, most=most, longest=longest)

    def unpadded_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (height, width) of an image before it is padded to whole units (Kimi K2.5)."""
        patches = max(1, height // self.patch) * max(1, width // self.patch)
        within = math.sqrt(self.most // self.patch**2 / patches)
        scale = min(1.0, within, self.longest / height, self.longest / width)
        tall, wide = (min(max(1, int(edge * scale)), self.longest) for edge in (height, width))
        return tall, wide

    def canvas_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the canvas on which an image keeps most pixels, the smallest of equal ones."""

        def pixels(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - canvas[0] * canvas[1]

        return max(self.canvases, key=pixels)

    def canvas_patches(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return rows and columns of an image's patches on its canvas, without those of the padding, and of
        those that are kept of them.
        """
        side = self.tile // self.unit
        rows, columns = (edge // self.tile * side for edge in self.canvas_of(width, height))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        kept = self.kept_tiles * side**2
        if kept and (ratio := math.sqrt(rows * columns / kept)) > 1.1:
            return (rows, columns), (int(rows // ratio), int(columns // ratio))
        return (rows, columns), (rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileText:
    """Texts of an image that is cut, with {tokens} for image tokens, and in `tile` also {row}, {column} and
    {number}, from 1.
    """

    tile: str
    column_join: str = ""
    row_join: str = ""
    tiles_end: str = ""
    whole: str
    """Text of the whole image beside its tiles."""
    whole_first: bool = False
    single: str = ""
    """Text of an image that is not cut; empty: as `whole`."""
    joins_are_rows: bool = False
    """True if image tokens stand before the whole, after it, between tiles and at the end (Ovis2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Vision part of a model. `tower` and `processor` are for the modules of towers and images alone."""

    family: str
    """Name of the family in docs and errors."""
    image_token_id: int
    """Token id of a row that takes an embedding of the tower."""
    placeholder: str
    """Text that the chat template writes where an image stands; `ImageLayout.text` replaces it."""
    image_text: str
    """Text of `image_token_id`."""
    start: str = ""
    line_end: str = ""
    end: str = ""
    """Texts before the image tokens of an image, between its lines and after it, where the chat template
    does not write them."""
    tile_text: TileText | None = None
    """Texts of an image that may be cut into tiles."""
    number_marks: tuple[str, ...] = ()
    """Texts around the number of an image, which stands before it; empty: images have no numbers."""
    hidden_size: int
    """Width of an embedding, that of the language model."""
    pad_id: int = 0
    """Token id that stands for such a row where layers have embeddings of their own."""
    mrope_section: tuple[int, ...] = ()
    """Frequencies of time, height and width (M-RoPE); empty: rows of an image have positions as text."""
    mrope_interleaved: bool = False
    """True if the frequencies of the three axes alternate, and do not follow each other."""
    embedding_scale: float = 1.0
    """Factor of embeddings, where the language model multiplies its inputs (Granite)."""
    is_bidirectional: bool = False
    """True if the rows of an image attend to each other in both directions."""
    bidirectional_windows: bool = False
    """True if they do so in layers with a sliding window alone (Gemma 4)."""
    tower: TowerConfig
    processor: ImageProcessorConfig
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of all tensors of tower and projector, by their names without `model.`."""

    def number_text(self, number: int) -> str:
        """Return the text with the number of an image in its prompt, from 0; empty for most families."""
        return str(number).join(self.number_marks) if self.number_marks else ""

    @property
    def deepstack_levels(self) -> int:
        """Further embeddings of each row, added after the first layers of the language model."""
        return len(self.tower.deepstack)

    @property
    def num_params(self) -> int:
        """Parameters of tower and projector."""
        return sum(map(math.prod, self.tensors.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Tiles, rows and text of an image of a given size."""

    tiles: tuple[tuple[int, int], ...]
    """(height, width) of each tile in pixels, in the order in which the tower reads them."""
    num_rows: int
    """Rows with embeddings: so many image tokens are in `text`."""
    text: str
    """Text that replaces the placeholder, with one image token for each row."""
    grid: tuple[int, int] = (0, 0)
    """Rows and columns of embeddings, for M-RoPE."""
    tile_grid: tuple[int, int] = (0, 0)
    """Rows and columns of tiles; zeros: one tile has all of the image."""
    images: int = 1
    """Number of equal shares of the tiles, each of which is an image of its own to the engine."""


CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
HALF: Final = (0.5, 0.5, 0.5)
MAX_SIDE: Final = 1 << 14
"""Largest tile, edge or patch in pixels."""
LINEARS: Final = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
"""Names of the linears of most projectors."""
IMAGE_ROWS: Final = 4096
"""Rows of the largest image that memory is planned for; larger ones take more while they are encoded."""
SLICE_PATCHES: Final = 2048
"""Patches whose linears a tower computes at once: their inner rows bound memory."""
USUAL_SIDE: Final = 1024
"""Side of the image whose tokens are shown, in pixels."""
KEPT_IMAGE_ROWS: Final = 4096
"""Rows whose embeddings are kept."""
NO_TOWER: Final = "it is a language model without a vision tower"
"""Reason why a model of texts cannot read images."""
