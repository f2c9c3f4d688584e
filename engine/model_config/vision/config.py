"""Vision part of config.json and of the processor's files, and the layout of one picture."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Facts of a vision tower that the scheduler, the API and the memory plan need.

    Sizes of the tower itself and the rules of its processor stand in `tower` and `processor`; only the
    modules of the family read them.
    """

    family: str
    """Key of `VISION_FAMILIES`, and of the tables in `engine/vision` and `app/images`: a `model_type`."""
    image_token_id: int
    """Token id of a row that takes an embedding of the tower."""
    placeholder: str
    """Text that the chat template writes where a picture stands; `ImageLayout.text` replaces it."""
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
    deepstack_levels: int = 0
    """Further embeddings of each row, added after the first layers of the language model."""
    num_params: int = 0
    """Parameters of tower and projector."""
    tower: dict[str, Any]
    processor: dict[str, Any]


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
