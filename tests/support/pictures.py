"""Pictures in prompts without a tower: a deterministic projection of pixels stands in for it."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmbox.engine.config import EngineConfig, SchedulerConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.images import ImageScheduler
from llmbox.engine.core.kv_cache.block_pool import BlockPool
from llmbox.engine.core.scheduler import Scheduler
from llmbox.engine.core.step import SyncExecutor
from llmbox.engine.distributed.communicator import SINGLE
from llmbox.engine.executor.build import memory_budget
from llmbox.engine.executor.load_model import model_info
from llmbox.engine.executor.rank_engine import load_rank
from llmbox.engine.ipc.messages import AddRequest, PreparedImage
from llmbox.engine.model.rotary import Rotary
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.vision.config import (
    ImageProcessorConfig,
    TowerConfig,
    TowerNames,
    VisionConfig,
)
from llmbox.engine.planning.estimator import estimate
from llmbox.engine.runner.cpu_runner import CPUModelRunner
from llmbox.engine.runner.image_rows import EncodedImages
from llmbox.engine.sampling_params import SamplingParams

IMAGE = 300
"""Token id of rows of pictures."""
BREAK = 301
"""Token id between rows of some pictures."""


def vision_config(hidden: int, **options: Any) -> VisionConfig:
    """A vision part whose tower is never loaded."""
    deepstack = options.pop("deepstack", ())
    names = TowerNames(patch="patch", layers="layers", projector=("", "", ""))
    tower = TowerConfig(
        names=names,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        stored_layers=1,
        num_heads=1,
        head_dim=8,
        patch_size=4,
        activation="gelu",
        projector="merger",
        deepstack=deepstack,
    )
    processor = ImageProcessorConfig(kind="square", unit=4, mean=(0.0,), std=(1.0,), resample=3)
    return VisionConfig(
        family="fake",
        image_token_id=IMAGE,
        placeholder="<image>",
        image_text="<image>",
        hidden_size=hidden,
        tower=tower,
        processor=processor,
        **options,
    )


class FakeEncoder:
    """Tower of three slices: each row is noise from a hash of all pixels and its number."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.encoded: list[bytes] = []
        self.slices = 0
        self.broken = False

    def encode(self, image: PreparedImage) -> Generator[None, None, Tensor]:
        for _ in range(2):
            self.slices += 1
            yield
        if self.broken:
            raise IndexError("no position for it")
        self.encoded.append(image.content_hash)
        generator = torch.Generator().manual_seed(int.from_bytes(sha256(image.pixels).digest()[:7], "big"))
        size = (1 + self.config.deepstack_levels, image.num_rows, self.config.hidden_size)
        return torch.randn(size, generator=generator).to(self.dtype)


def picture(color: int, rows: int = 3, columns: int = 4, *, breaks: bool = False) -> PreparedImage:
    """A picture of rows x columns embeddings and one color; with `breaks` a token of text ends each row."""
    pixels = bytes([color, 0, 0]) * (rows * columns * 16)
    tokens = rows * columns + (rows - 1 if breaks else 0)
    return PreparedImage(
        content_hash=sha256(pixels).digest(),
        tiles=[(rows * 4, columns * 4)],
        pixels=pixels,
        grid=(0, 0) if breaks else (rows, columns),
        num_tokens=tokens,
        num_rows=rows * columns,
    )


def prompt_of(*pieces: Sequence[int] | PreparedImage) -> tuple[list[int], list[PreparedImage]]:
    """Token ids of texts and pictures one after another, and the pictures in their places."""
    ids: list[int] = []
    images: list[PreparedImage] = []
    for piece in pieces:
        if not isinstance(piece, PreparedImage):
            ids += piece
            continue
        images.append(replace(piece, start=len(ids)))
        gap = piece.num_tokens - piece.num_rows
        line = [IMAGE] * (piece.num_rows // (gap + 1))
        ids += line
        for _ in range(gap):
            ids += [BREAK, *line]
    return ids, images


def ask_about(name: str, *pieces: Any, max_tokens: int = 6, **fields: Any) -> AddRequest:
    ids, images = prompt_of(*pieces)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return AddRequest(request_id=name, prompt_ids=ids, images=images, params=params, **fields)


class SeeingModel:
    """A tiny model with a fake tower, whose weights all engines of a test share."""

    def __init__(self, directory: Path, **vision: Any) -> None:
        config = EngineConfig(
            model_path=str(directory), name="tiny", device="cpu", threads=1, memory_bytes=256 << 20
        )
        model = parse_config(directory)
        self.vision = vision_config(model.hidden_size, **vision)
        plan = estimate(model.shape(), memory_budget(torch.device("cpu")), config)
        share = load_rank(config, plan, SINGLE, lambda *_: None)
        runner, plan = share.finish()
        assert isinstance(runner, CPUModelRunner)
        runner._rotary = Rotary(replace(model, vision=self.vision), plan.context, torch.device("cpu"))
        self.runner, self.plan = runner, plan
        info = model_info(config, model, plan, "fake", 0.0, None, [])
        self.info = replace(info, image_problem="", image_token_id=IMAGE)
        self.encoder = FakeEncoder(self.vision, torch.float32)

    def engine(
        self, *, cache: bool = True, num_blocks: int = 0, image_bytes: int = 1 << 20, **config: Any
    ) -> Engine:
        numbers = {"context": self.plan.context, "max_running": 8, "token_budget": 64, "draft_rows": 0}
        self.encoder = FakeEncoder(self.vision, self.runner._model.dtype)
        self.runner.images = EncodedImages(self.vision, self.encoder, self.runner._model.dtype)
        blocks = num_blocks or min(64, self.plan.num_blocks)
        pool = BlockPool(blocks, self.plan.block_size, enable_prefix_cache=cache)
        images = ImageScheduler(
            self.runner.images,
            row_bytes=self.runner.images.row_bytes,
            cache_bytes=image_bytes,
            is_bidirectional=self.vision.is_bidirectional,
        )
        scheduler = Scheduler(SchedulerConfig(**{**numbers, **config}), pool, images=images)
        return Engine(scheduler, SyncExecutor(self.runner), self.info)
