"""Vision part of a model as data: its tower and its processor, what the engine and the API need to know, and
the fields of files that families read it from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from ..fields import MAX_LAYERS, MAX_WIDTH, Fields, show

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
PositionTable = Literal["", "whole", "buckets", "bilinear", "bicubic", "antialiased", "axes", "places"]
"""Learned positions of patches: none; a row for each patch; a square of rows, of which each patch takes the
one at its fraction of the image, or a bilinear or bicubic mean, or one with antialiasing; or a row for its
column and one for its row, from two tables, stored one after the other or side by side."""
VisionRope = Literal["", "axial", "alternating", "pairs"]
"""RoPE of rows and columns: none; the first half of the frequencies for rows; every other one; those of
neighboring numbers, the first half for columns, counted from 1 as the class embedding has position 0.
"""
ProjectorKind = Literal[
    "mistral3", "llava", "pixel_shuffle", "pixel_shuffle_mlp", "llama4", "gemma3", "merger", "lfm3_vl", "glm",
    "gemma4", "gemma4_unified",
]  # fmt: skip
ResizeKind = Literal[
    "longest_edge", "tiles", "canvas", "padded_canvas", "square", "center_crop", "pixels", "glm", "lfm2",
    "gemma4",
]  # fmt: skip
"""Rule for the size of an image (`shape.py`)."""


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
    norm1: str = "norm1"
    norm2: str = "norm2"
    after_attention: str = ""
    after_mlp: str = ""
    """Norms of the results of attention and MLP, where there are such."""
    attention_scale: str = ""
    mlp_scale: str = ""
    """Factors of the results of attention and MLP (LayerScale), where there are such."""
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
    """Norm, first and second linear of the projector, from the top; empty where there is none. A third linear
    may follow."""


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
    output_bias: bool | None = None
    """Bias of the linear after attention; None: as `attention_bias`."""
    wide_norms: bool = False
    """True if queries and keys are normalized over all heads together, not each by itself."""
    mlp_bias: bool = True
    patch_bias: bool = True
    scales_queries: bool = True
    """False if attention's scores are not divided by the root of `head_dim`."""
    table: PositionTable = ""
    table_rows: int = 0
    """Learned positions, beside that of the class embedding."""
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
        return self.projector in {"merger", "lfm3_vl", "glm"}

    @property
    def has_output_bias(self) -> bool:
        return self.attention_bias if self.output_bias is None else self.output_bias

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
    """Side of a tile, or of the whole image."""
    splits: bool = False
    """True if large images are cut into tiles."""
    least: int = 0
    most: int = 0
    """Limits of the pixels of an image."""
    tile_counts: tuple[int, int] = (1, 1)
    """Least and most tiles."""
    thumbnail: bool = False
    """True if the whole image comes after its tiles."""
    tolerance: float = 1.0
    """Factor of `most` from which on an image is cut into tiles; ratio of its edges for crops."""
    crop: int = 0
    """Least edge of the crops that follow the whole image (Gemma 3's pan and scan); 0: none follow."""


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
    hidden_size: int
    """Width of an embedding, that of the language model."""
    pad_id: int = 0
    """Token id that stands for such a row where layers have embeddings of their own."""
    mrope_section: tuple[int, ...] = ()
    """Frequencies of time, height and width (M-RoPE); empty: rows of an image have positions as text."""
    mrope_interleaved: bool = False
    """True if the frequencies of the three axes alternate, and do not follow each other."""
    is_bidirectional: bool = False
    """True if the rows of an image attend to each other in both directions."""
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
    pictures: int = 1
    """Number of equal shares of the tiles, each of which is an image of its own to the engine."""


CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
HALF: Final = (0.5, 0.5, 0.5)
MAX_SIDE: Final = 1 << 14
"""Largest tile, edge or patch in pixels."""
MAX_PIXELS: Final = 1 << 28
_ACTIVATIONS: Final[dict[str, VisionActivation]] = {
    **{name: name for name in get_args(VisionActivation)},
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFiles:
    """Fields of a model's files that its vision part is read from."""

    model: Fields
    """config.json."""
    tower: Fields
    """Its `vision_config`."""
    processor: Fields
    """Image processor; empty where there is no file of it."""
    tokenizer: Fields
    """tokenizer_config.json; empty where there is none."""
    text: Fields
    """`text_config`, or config.json."""
    hidden_size: int
    """Width of the language model."""


VisionRule = Callable[[VisionFiles], VisionConfig]


def activation_of(fields: Fields, default: str, key: str = "hidden_act") -> VisionActivation:
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise fields.error(f"{key} {show(name)} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def side_of(fields: Fields, key: str, default: int) -> int:
    """Return the side of a square, which files may give as a list of two equal numbers, or an object."""
    value = fields.raw.get(key)
    if isinstance(value, Mapping):
        value = [value.get("height"), value.get("width")]
    if isinstance(value, (list, tuple)):
        if len(set(map(str, value))) != 1:
            raise fields.error(f"{key} {show(value)} is not supported, only squares")
        fields = Fields({key: value[0]}, fields.where)
    return fields.integer(key, default, most=MAX_SIDE)


def sizes_of(
    fields: Fields,
    *,
    width: int,
    inner: int,
    layers: int,
    heads: int = 16,
    patch: int = 14,
    keys: tuple[str, str, str] = ("hidden_size", "num_hidden_layers", "num_attention_heads"),
) -> dict[str, Any]:
    """Return the sizes that all towers have, from `keys` and their defaults in transformers."""
    hidden = fields.integer(keys[0], width, most=MAX_WIDTH)
    count = fields.integer(keys[1], layers, most=MAX_LAYERS)
    num_heads = fields.integer(keys[2], heads, most=MAX_WIDTH)
    head_dim = hidden // num_heads
    if head_dim * num_heads != hidden:
        raise fields.error(f"{keys[0]} {hidden} is not a multiple of {keys[2]} {num_heads}")
    if fields.integer("num_channels", 3) != 3 or fields.integer("in_channels", 3) != 3:
        raise fields.error("images without 3 color channels are not supported")
    return {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", inner, most=16 * MAX_WIDTH),
        "num_layers": count,
        "stored_layers": count,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "patch_size": side_of(fields, "patch_size", patch),
    }


def rope_theta(fields: Fields, default: float = 10000.0) -> float:
    rope = Fields(fields.mapping("rope_parameters") or {}, fields.where)
    theta = rope.number("rope_theta", fields.number("rope_theta", default))
    if rope.text("rope_type", "axial") not in {"axial", "default"} or not 1.0 < theta <= 1e15:
        raise fields.error(f"rope_parameters {show(dict(rope.raw))} are not supported for images")
    return theta


def pixels_of(
    files: VisionFiles, mean: tuple[float, ...], std: tuple[float, ...], resample: int
) -> dict[str, Any]:
    """Return normalization and filter of the image processor. Raises ModelError."""
    fields = files.processor
    for key in ("do_resize", "do_rescale"):
        if not fields.flag(key, default=True):
            raise fields.error(f"{key} false is not supported")
    normalizes = fields.flag("do_normalize", default=True)
    mean = fields.numbers("image_mean") or mean if normalizes else (0.0, 0.0, 0.0)
    std = fields.numbers("image_std") or std if normalizes else (1.0, 1.0, 1.0)
    scale = fields.number("rescale_factor", 1 / 255)
    if len(mean) != 3 or len(std) != 3 or not all(each > 0 for each in std) or not 0 < scale <= 1:
        raise fields.error("image_mean and image_std must have 3 numbers each, std above 0")
    number = fields.raw.get("resample")
    if number is not None and (not isinstance(number, int) or number not in range(6)):
        raise fields.error(f"resample must be the number of a filter of Pillow, 0 to 5, not {show(number)}")
    return {
        "mean": mean,
        "std": std,
        "rescale": scale,
        "resample": resample if number is None else number,
    }


def size_of(fields: Fields, key: str, names: tuple[str, ...], default: int, most: int) -> int:
    """Return a number of the object `key`, under one of its names."""
    size = Fields(fields.mapping(key) or {}, f"{fields.where}: {key}")
    for name in names:
        if size.raw.get(name) is not None:
            return size.integer(name, most=most)
    return default


def token_text(files: VisionFiles, key: str, default: str) -> str:
    """Return the text of a special token from tokenizer_config.json."""
    value = files.tokenizer.raw.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else default


def token_id(files: VisionFiles, default: int, *keys: str) -> int:
    for key in keys:
        if files.model.raw.get(key) is not None:
            return files.model.integer(key)
    return default
