"""Rows of images in a step: their embeddings and their positions, and the tower that makes them.

L = 1 + deepstack levels, R rows of images in the step, T rows of the step, E hidden size.
"""

from array import array
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout
from llmbox.kernels.ops import Ops

from ..checkpoint.tensor_io import bytes_of
from ..core.request import first_image
from ..core.step import ImagePiece, ScheduledRequest
from ..device.device import from_array, move
from ..ipc.messages import PreparedImage
from ..model.forward_context import ImageRows
from ..model_config.config import ModelConfig
from ..model_config.parallel_layout import ParallelLayout
from ..model_config.vision.config import VisionConfig
from ..vision.encoder import CPU, VisionEncoder, load_vision_encoder


class EncodedImages:
    """Tower and its embeddings by content hash; `ImageScheduler` decides what is kept. The
    first rank has the tower. Others get the embeddings of each step with its plan.
    """

    def __init__(
        self,
        config: VisionConfig,
        encoder: VisionEncoder | None,
        dtype: torch.dtype,
        device: torch.device = CPU,
        *,
        is_shared: bool = False,
    ) -> None:
        """`encoder`: None on ranks without the tower. `is_shared`: there are such ranks."""
        self.config = config
        self.row_bytes = config.hidden_size * (1 + config.deepstack_levels) * dtype.itemsize
        self._dtype = dtype
        self._device = device
        self._kept_on = CPU if is_shared else device
        self._encoder = encoder
        self._slices: dict[bytes, Generator[None, None, Tensor]] = {}
        self._levels: dict[bytes, Tensor] = {}
        """Embeddings [L, R, E]."""

    @torch.inference_mode()
    def advance(self, image: PreparedImage) -> bool:
        """Compute one slice of an image. True once its embeddings are kept. Raises ValueError for a tower
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
            self._levels[image.content_hash] = levels.to(self._kept_on)
            return True
        return False

    def try_out(self, image: PreparedImage) -> None:
        """Encode an image and drop the result, for measurements; does nothing on ranks without the tower."""
        while self._encoder is not None and not self.advance(image):
            pass
        self.drop(image.content_hash)

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
        places = array("q")
        levels: list[Tensor] = []
        for own_R, piece in self._pieces(rows):
            places.extend(own_R)
            levels.append(self._received(sent[piece]) if sent else self._kept(piece))
        if not places:
            return None
        levels_LRE = torch.cat(levels, 1)
        if levels_LRE.device != self._device:
            levels_LRE = move(levels_LRE, self._device)
        return ImageRows(move(from_array(places), self._device), levels_LRE)

    def has_rows(self, rows: Sequence[ScheduledRequest]) -> bool:
        """Return True if a row of the step belongs to an image."""
        for row in rows:
            images = row.request.images
            following = first_image(images, row.start) if images else 0
            if following < len(images) and images[following].start < row.end:
                return True
        return False

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

    def _pieces(self, rows: Sequence[ScheduledRequest]) -> Iterator[tuple[list[int], ImagePiece]]:
        """Yield the step's rows that each image has, and which of the image's rows they are."""
        first = 0
        for row in rows:
            images = row.request.images
            for image in images[first_image(images, row.start) :]:
                if image.start >= row.end:
                    break
                own_R: Sequence[int] = range(image.num_tokens)
                if image.num_rows < image.num_tokens:  # some are text
                    ids = row.request.prompt_ids[image.start : image.start + image.num_tokens]
                    own_R = [place for place, token in enumerate(ids) if token == self.config.image_token_id]
                begin, end = (bisect_left(own_R, place - image.start) for place in (row.start, row.end))
                if begin < end:
                    offset = first + image.start - row.start
                    yield [offset + place for place in own_R[begin:end]], (image.content_hash, begin, end)
            first += row.num_tokens

    def split(self, layout: BatchLayout, rows: Sequence[ScheduledRequest]) -> BatchLayout:
        """Return the layout with a sequence for each image of the step, where rows of an image attend to
        each other in both directions.
        """
        if not self.config.is_bidirectional:
            return layout
        span = 2 if self.config.bidirectional_windows else 1
        return split_images(layout, rows, span)

    def positions(self, rows: Sequence[ScheduledRequest]) -> Tensor | None:
        """Return the RoPE positions of a step by time, height and width, [3, T]; None where these are those
        of the tokens.
        """
        if not self.config.mrope_section:
            return None
        axes = tuple(array("i") for _ in range(3))
        for row in rows:
            extend_positions(axes, row.request.images, row.start, row.start + row.num_tokens)
        return move(torch.stack([from_array(axis) for axis in axes]), self._device)


def split_images(layout: BatchLayout, rows: Sequence[ScheduledRequest], span: int) -> BatchLayout:
    """Cut sequences of a step before and after each image, whose sequence has `span` in `spans_N`."""
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
    starts = array("i", accumulate(lens, initial=0))
    device = layout.block_tables_NB.device
    starts_N1, ends_N, spans_N, owner_N = (
        move(from_array(each), device) for each in (starts, array("i", ends), spans, array("q", owners))
    )
    window = layout.window
    if window is not None:
        window = replace(window, block_tables_NB=window.block_tables_NB.index_select(0, owner_N))
    return replace(
        layout,
        query_lens=lens,
        contexts=ends,
        query_starts_N1=starts_N1,
        context_lens_N=ends_N,
        block_tables_NB=layout.block_tables_NB.index_select(0, owner_N),
        window=window,
        spans_N=spans_N,
    )


def extend_positions(
    axes: tuple["array[int]", ...], images: Sequence[PreparedImage], start: int, end: int
) -> None:
    """Append the positions of tokens `start` to `end` to the three axes.

    Text counts on from the largest position before it. Rows of an image have one time, and heights and
    widths from there on (M-RoPE), so that an image takes as many positions as its longer side.
    """
    shift, position = 0, start
    for image in images:
        if not image.is_grid:
            continue
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
    model: ModelConfig,
    directory: Path,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    rank: ParallelLayout,
) -> EncodedImages:
    """Load the vision tower of a model that has one, on the first rank. Raises ModelError."""
    assert model.vision is not None
    encoder = None
    if rank.rank == 0:
        encoder = load_vision_encoder(model.vision, directory, ops, dtype, device)
    return EncodedImages(model.vision, encoder, dtype, device, is_shared=rank.ranks > 1)
