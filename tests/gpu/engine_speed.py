"""Whole engines on random weights made on the spot: no files, no network, no tokenizer."""

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu import stand_ins

stand_ins.put_in_place()

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.errors import DoesNotFit
from llmbox.engine.executor.build import load_engine
from llmbox.engine.executor.load_model import Loaded, WeightsWanted
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model.registry import build_model
from llmbox.engine.model_config.config import ModelConfig
from llmbox.engine.sampling_params import SamplingParams
from llmbox.engine.weights.source import WeightRequest, pack
from llmbox.kernels.ops import Ops


@dataclass
class RandomWeights:
    """A `Source` of small normal numbers; norms are ones."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    rank: Any
    spread: float = 0.02
    on_host: bool = False
    """Made there and copied: the same numbers for every device."""
    bytes_made: int = field(default=0)

    def vector(self, name: str, size: int) -> Tensor:
        del name
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def packed(self, asked: WeightRequest) -> Any:
        if self.on_host:
            weight_OI = torch.empty(asked.shape).normal_(0, self.spread).to(self.dtype).to(self.device)
        else:
            weight_OI = torch.empty(asked.shape, dtype=self.dtype, device=self.device)
            weight_OI.normal_(0, self.spread)
        bias_O = torch.zeros(asked.shape[0], dtype=self.dtype, device=self.device) if asked.bias else None
        self.bytes_made += weight_OI.nbytes
        return pack(self.ops, asked.kind, weight_OI, bias_O)

    def skip(self, name: str) -> None:
        """Nothing is stored that could be left out."""

    def finish(self) -> None:
        """Everything that was asked for was made."""


def random_weights(config: ModelConfig, wanted: WeightsWanted, _progress: object, **options: Any) -> Loaded:
    torch.manual_seed(1)
    source = RandomWeights(wanted.ops, wanted.dtype, wanted.device, wanted.rank, **options)
    return build_model(config, source), source.bytes_made


def engine(shape: dict[str, Any], weights: Any = random_weights, **options: Any) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        config = EngineConfig(
            model_path=folder, name="random", prefix_cache=False, **{"device": "cuda", **options}
        )
        with mock.patch("llmbox.engine.executor.rank_engine.load_weights", weights):
            return load_engine(config, lambda _: None)


def largest(shape: dict[str, Any], contexts: Sequence[int], **options: Any) -> Engine:
    """With the first of these contexts that the card has room for. Raises DoesNotFit."""
    for context in contexts[:-1]:
        with suppress(DoesNotFit):
            return engine(shape, context=context, **options)
    return engine(shape, context=contexts[-1], **options)


def add(engine: Engine, count: int, prompt: int, output: int, name: str = "r", **params: Any) -> list[str]:
    """`count` requests of random prompts that end at their length; their names."""
    names = [f"{name}{number}" for number in range(count)]
    for one in names:
        ids = torch.randint(3, engine.info.vocab_size, (prompt,)).tolist()
        sampling = SamplingParams(max_tokens=output, min_tokens=output, **{"temperature": 0.0, **params})
        refused = engine.add(AddRequest(request_id=one, prompt_ids=ids, params=sampling))
        assert refused is None, refused
    return names


@dataclass(frozen=True, slots=True)
class Run:
    """One load, run to its end. Seconds."""

    wall: float
    decode_step: float
    """Mean of the steps in which all requests were decoding."""
    first: dict[str, float]
    """To each request's first token."""
    tokens: int


def run(engine: Engine, names: list[str]) -> Run:
    waiting, started = set(names), time.perf_counter()
    first: dict[str, float] = {}
    tokens = steady_tokens = 0
    steady_from = steady_to = 0.0
    while engine.has_work:
        outputs = engine.step().outputs
        now = time.perf_counter() - started
        for output in outputs:
            assert output.finish_reason in {None, "length"}, output
            tokens += len(output.token_ids)
            if output.token_ids:
                first.setdefault(output.request_id, now)
            if output.finish_reason:
                waiting.discard(output.request_id)
        if len(first) == len(names) and len(waiting) == len(names):
            if not steady_from:
                steady_from = now
            else:
                steady_to = now
                steady_tokens += sum(len(output.token_ids) for output in outputs)
    rounds = steady_tokens / len(names)
    step = (steady_to - steady_from) / rounds if rounds else float("nan")
    return Run(time.perf_counter() - started, step, first, tokens)


def warm_up(engine: Engine, seconds: float = 60.0) -> None:
    """Compiles what prompts and decoding need, then lets the runner capture its graphs."""
    run(engine, add(engine, 2, 300, 40, "warm"))
    prepare = getattr(engine, "prepare", None) or getattr(engine.executor, "prepare", lambda: False)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and prepare():
        pass


def first_token_under_load(engine: Engine, busy: int, prompt: int) -> float:
    """Seconds to the first token of a prompt that arrives while `busy` others decode."""
    names = add(engine, busy, 256, 400, "busy")
    seen: set[str] = set()
    while len(seen) < busy:
        seen |= {output.request_id for output in engine.step().outputs if output.token_ids}
    (late,) = add(engine, 1, prompt, 2, "late")
    started = time.perf_counter()
    while not any(output.request_id == late for output in engine.step().outputs):
        pass
    took = time.perf_counter() - started
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return took
