"""Sizes of a vision tower for the memory plan."""

from dataclasses import dataclass, replace

from .config import VisionConfig
from .layout import lay_out_image

PICTURE_ROWS = 4096
"""Rows of the largest picture that memory is planned for; larger ones take more while they are encoded."""
SLICE_PATCHES = 2048
"""Patches whose linears a tower computes at once: their inner rows bound memory."""
USUAL_SIDE = 1024
"""Side of the picture whose tokens are shown, in pixels."""
KEPT_PICTURE_ROWS = 4096
"""Rows whose embeddings are kept."""

NO_TOWER = "it is a language model without a vision tower"
"""Reason why a model of texts reads no pictures."""


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
    slice_numbers: int
    """Numbers of a layer's activations that do not grow with the picture: norms and inner rows of a slice."""
    whole_rows: int = 0
    """Most rows of a picture where a step computes all of one, beyond its budget if need be; 0 otherwise."""
    usual_rows: int = 0
    """Rows of a picture of `USUAL_SIDE` x `USUAL_SIDE` pixels."""

    def share(self, ranks: int) -> "VisionShape":
        """Return what each of the ranks in one memory counts of the tower, which the first of them has."""
        numbers = ("params", "row", "patch_numbers", "slice_numbers")
        return replace(self, **{name: -(-getattr(self, name) // ranks) for name in numbers})


def vision_shape(vision: VisionConfig) -> VisionShape:
    tower, rules = vision.tower, vision.processor
    usual = lay_out_image(vision, USUAL_SIDE, USUAL_SIDE).num_rows
    return VisionShape(
        params=vision.num_params,
        row=vision.hidden_size * (1 + vision.deepstack_levels),
        patch_numbers=tower.merge**2 * (14 if tower.conv_layers else 7) * tower.hidden_size,
        slice_numbers=SLICE_PATCHES * (2 * tower.hidden_size + 3 * tower.intermediate_size),
        whole_rows=max(usual, rules.most // rules.unit**2) if vision.is_bidirectional else 0,
        usual_rows=usual,
    )
