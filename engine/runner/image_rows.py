"""Rows of pictures in a step: their embeddings and their positions, and the tower that makes them.

L = 1 + deepstack levels, R rows of pictures in the step, T rows of the step, E hidden size.
"""

from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout
from llmbox.kernels.ops import Ops

from ..checkpoint.tensor_io import bytes_of
from ..core.request import first_image
from ..core.step import ImagePiece, ScheduledRequest
from ..device.upload import from_array
from ..ipc.messages import PreparedImage
from ..model.forward_context import ImageRows
from ..model_config.config import ModelConfig
from ..model_config.vision.config import VisionConfig
from ..vision.encoder import VisionEncoder, load_vision_encoder


class EncodedImages:
    """Tower and the embeddings that it has made, by content hash; `ImageScheduler` says what is kept. The
    first rank has the tower. Others get the embeddings of each step with its plan.
    """

    def __init__(self, config: VisionConfig, encoder: VisionEncoder | None, dtype: torch.dtype) -> None:
        """`encoder`: None on ranks without the tower."""
        self.config = config
        self.row_bytes = config.hidden_size * (1 + config.deepstack_levels) * dtype.itemsize
        self._dtype = dtype
        self._encoder = encoder
        self._slices: dict[bytes, Generator[None, None, Tensor]] = {}
        self._levels: dict[bytes, Tensor] = {}
        """Embeddings [L, R, E]."""

    @torch.inference_mode()
    def advance(self, image: PreparedImage) -> bool:
        """Compute one slice of a picture. True once its embeddings are kept. Raises ValueError for a tower
        that gives another number of rows than the prompt has.
        """
        slices = self._slices.get(image.content_hash)
        if slices is None:
            assert self._encoder is not None
            slices = self._slices[image.content_hash] = self._encoder.encode(image)
        try:
            next(slices)
        except StopIteration as end:
            del self._slices[image.content_hash]
            levels: Tensor = end.value
            if levels.shape[:2] != (1 + self.config.deepstack_levels, image.num_rows):
                raise ValueError(f"{image.num_rows} rows were expected, not {tuple(levels.shape)}") from None
            self._levels[image.content_hash] = levels
            return True
        return False

    def drop(self, content_hash: bytes) -> None:
        self._levels.pop(content_hash, None)
        slices = self._slices.pop(content_hash, None)
        if slices is not None:
            slices.close()

    def rows(
        self, rows: Sequence[ScheduledRequest], sent: Mapping[ImagePiece, bytes] | None = None
    ) -> ImageRows | None:
        """Return the rows of a step that take embeddings; None if it has none. `sent`: embeddings that came
        with the plan.
        """
        places: list[Tensor] = []
        levels: list[Tensor] = []
        for first_R, piece in self._pieces(rows):
            places.append(first_R)
            levels.append(self._received(sent[piece]) if sent else self._kept(piece))
        if not places:
            return None
        return ImageRows(torch.cat(places), torch.cat(levels, 1))

    def pieces(self, rows: Sequence[ScheduledRequest]) -> dict[ImagePiece, bytes]:
        """Return the embeddings of a step for the ranks without the tower."""
        found = {}
        for _, piece in self._pieces(rows):
            levels_LRE = self._kept(piece).contiguous()
            found[piece] = bytes(bytes_of(levels_LRE))
        return found

    def _kept(self, piece: ImagePiece) -> Tensor:
        content_hash, begin, end = piece
        return self._levels[content_hash][:, begin:end]

    def _received(self, sent: bytes) -> Tensor:
        numbers = torch.frombuffer(bytearray(sent), dtype=self._dtype)
        return numbers.view(1 + self.config.deepstack_levels, -1, self.config.hidden_size)

    def _pieces(self, rows: Sequence[ScheduledRequest]) -> Iterator[tuple[Tensor, ImagePiece]]:
        """Yield the step's rows that each picture has, and which of the picture's rows they are."""
        first = 0
        for row in rows:
            images = row.request.images
            for image in images[first_image(images, row.start) :]:
                if image.start >= row.end:
                    break
                ids = row.request.prompt_ids[image.start : image.start + image.num_tokens]
                own_R = (torch.tensor(ids) == self.config.image_token_id).nonzero().flatten()
                begin, end = torch.searchsorted(
                    own_R, torch.tensor([row.start - image.start, row.end - image.start])
                ).tolist()
                if begin == end:  # of text between rows of the picture alone
                    continue
                places_R = own_R[begin:end] + (first + image.start - row.start)
                yield places_R, (image.content_hash, begin, end)
            first += row.num_tokens

    def split(self, layout: BatchLayout, rows: Sequence[ScheduledRequest]) -> BatchLayout:
        """Return the layout with a sequence for each picture of the step, where rows of a picture attend to
        each other in both directions.
        """
        if not self.config.is_bidirectional:
            return layout
        span = 2 if self.config.bidirectional_windows else 1
        return split_pictures(layout, rows, span)

    def positions(self, rows: Sequence[ScheduledRequest]) -> Tensor | None:
        """Return the RoPE positions of a step by time, height and width, [3, T]; None where these are those
        of the tokens.
        """
        if not self.config.mrope_section:
            return None
        axes = tuple(array("i") for _ in range(3))
        for row in rows:
            extend_positions(axes, row.request.images, row.start, row.start + row.num_tokens)
        return torch.stack([from_array(axis) for axis in axes])


def split_pictures(layout: BatchLayout, rows: Sequence[ScheduledRequest], span: int) -> BatchLayout:
    """Cut sequences of a step before and after each picture, whose sequence has `span` in `spans_N`."""
    lens, ends, spans, owners = [], [], array("i"), []
    for owner, row in enumerate(rows):
        position, end = row.start, row.start + row.num_tokens
        images = row.request.images
        for image in images[first_image(images, position) :]:
            if image.start >= end:
                break
            for stop, kind in ((image.start, 0), (min(image.start + image.num_tokens, end), span)):
                if stop > position:
                    lens.append(stop - position)
                    ends.append(stop)
                    spans.append(kind)
                    owners.append(owner)
                    position = stop
        if end > position:
            lens.append(end - position)
            ends.append(end)
            spans.append(0)
            owners.append(owner)
    if not any(spans):
        return layout
    window = layout.window
    if window is not None:
        window = replace(window, block_tables_NB=window.block_tables_NB[owners])
    return replace(
        layout,
        query_lens=lens,
        contexts=ends,
        query_starts_N1=torch.tensor([0, *lens]).cumsum(0).int(),
        context_lens_N=torch.tensor(ends, dtype=torch.int32),
        block_tables_NB=layout.block_tables_NB[owners],
        window=window,
        spans_N=from_array(spans),
    )


def extend_positions(
    axes: tuple["array[int]", ...], images: Sequence[PreparedImage], start: int, end: int
) -> None:
    """Append the positions of tokens `start` to `end` to the three axes.

    Text counts on from the largest position before it. Rows of a picture have one time, and heights and
    widths from there on (M-RoPE), so that a picture takes as many positions as its longer side.
    """
    shift, position = 0, start
    for image in images:
        if image.grid[0] * image.grid[1] != image.num_tokens:
            continue  # rows with text between them
        image_end = image.start + image.num_tokens
        if image_end > position:
            text_end = min(max(image.start, position), end)
            for axis in axes:
                axis.extend(range(position + shift, text_end + shift))
            stop = max(text_end, min(image_end, end))
            base, columns = image.start + shift, image.grid[1]
            own = range(text_end - image.start, stop - image.start)
            axes[0].extend([base] * len(own))
            axes[1].extend([base + i // columns for i in own])
            axes[2].extend([base + i % columns for i in own])
            position = stop
        if position >= end:
            return
        shift += max(image.grid) - image.num_tokens
    for axis in axes:
        axis.extend(range(position + shift, end + shift))


def load_images(
    model: ModelConfig, directory: Path, ops: Ops, dtype: torch.dtype, *, with_tower: bool
) -> EncodedImages:
    """Load the vision tower of a model that has one, if this rank has it. Raises ModelError."""
    assert model.vision is not None
    encoder = load_vision_encoder(model.vision, directory, ops, dtype) if with_tower else None
    return EncodedImages(model.vision, encoder, dtype)
