"""Rounds a checkpoint's weights to integers, once: a directory that loads by itself, and a report.

`python -P -m llmbox.engine.quantize SOURCE OUT FORMAT [--eval FILE] [--threads N]` writes one JSON object a
line to stdout: {"progress": [done, total]}…, then {"report": …} or {"error": {"code", "message"}}. The format
is described in `rounded.py`. How weights are rounded is decided by the kernels alone (`Packing.round`): a
checkpoint made here holds the very integers that `--quant` would make at load.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmbox.kernels.dispatch import QuantUnavailable, select_ops
from llmbox.kernels.ops import PackedLinear
from llmbox.kernels.packing import Packing, Rounded
from llmbox.kernels.quant import QUANTS, Quant
from llmbox.kernels.reference import REFERENCE

from .checkpoint import INDEX, list_tensors
from .errors import DeviceError, EngineError, ModelError
from .loader import load_engine
from .machine import read_cpu
from .model_config import ModelConfig, parse_config, read_json
from .models import build_model
from .parallel.rank import ALONE, Rank
from .perplexity import config_for, perplexity, sequences_of
from .rounded import FORMATS, SCALE, entry_in_config, format_of
from .shards import ShardWriter
from .weights import Asked, Checkpoint

CPU = torch.device("cpu")
DISK_RESERVE = 512_000_000
WORST = 10
ROWS_AT_ONCE = 4096
"""Of a weight in float32: a whole head would be gigabytes."""
LARGEST_COPY = 64 << 20
"""Bytes of a file beside the weights that is taken along."""
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TensorError:
    name: str
    format: str
    relative: float
    """|w - w'| / |w|, Euclidean."""
    weighted: float
    """The same with each weight's error counted as the search for scales counts it (`importance`)."""


@dataclass(slots=True)
class Report:
    format: str
    bytes_before: int = 0
    bytes_after: int = 0
    relative: float = 0.0
    """Of all rounded weights together."""
    worst: list[TensorError] = field(default_factory=list)
    tensors: int = 0
    kept: int = 0
    """Tensors that stay as they were."""
    perplexity_before: float | None = None
    perplexity_after: float | None = None


class Quantizer:
    """A `weights.Source` that writes what the model asks for, rounded as its place in the model wants."""

    def __init__(self, source: Checkpoint, quant: Quant, packing: Packing, out: ShardWriter) -> None:
        self.ops = REFERENCE
        self.rank: Rank = ALONE
        self.errors: list[TensorError] = []
        self.kept = 0
        self._squares = self._lost = 0.0
        self._source = source
        self._quant = quant
        self._packing = packing
        self._out = out

    @property
    def relative(self) -> float:
        return (self._lost / self._squares) ** 0.5 if self._squares else 0.0

    def vector(self, name: str, size: int) -> Tensor:
        vector = self._source.take(name, (size,))
        self._keep(name, vector)
        return vector

    def packed(self, asked: Asked) -> PackedLinear:
        quant = format_of(self._quant, asked.kind)
        for name, rows in asked.outputs.items():
            weight_OI = self._source.take(f"{name}.weight", (rows.total, asked.inputs.total))
            if quant is None:
                self._keep(f"{name}.weight", weight_OI)
            else:
                self._round(f"{name}.weight", weight_OI, quant)
            if asked.bias:
                self._keep(f"{name}.bias", self._source.take(f"{name}.bias", (rows.total,)))
        return None

    def skip(self, name: str) -> None:
        self._source.skip(name)

    def finish(self) -> None:
        self._source.finish()

    def _keep(self, name: str, tensor: Tensor) -> None:
        self.kept += 1
        self._out.add({name: tensor})

    def _round(self, name: str, weight_OI: Tensor, quant: Quant) -> None:
        rounded = self._packing.round(quant, weight_OI)
        self._out.add({name: stored(rounded), name + SCALE: rounded.scales_OG})
        squares = lost = weighted = weights = 0.0
        for start in range(0, len(weight_OI), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            w = weight_OI[rows].float()
            part = Rounded(quant, rounded.codes_OI[rows], rounded.scales_OG[rows])
            error = (w - part.floats()).square()
            square = w.square()
            squares += float(square.sum(dtype=torch.float64))
            lost += float(error.sum(dtype=torch.float64))
            counts = importance(w, quant.group)
            weighted += float((counts * error).sum(dtype=torch.float64))
            weights += float((counts * square).sum(dtype=torch.float64))
        self._squares, self._lost = self._squares + squares, self._lost + lost
        self.errors.append(
            TensorError(
                name,
                quant.name,
                (lost / squares) ** 0.5 if squares else 0.0,
                (weighted / weights) ** 0.5 if weights else 0.0,
            )
        )


def quantize(source: Path, out: Path, quant: Quant, threads: int, progress: Progress) -> Report:
    """Writes `out`, which must not exist, in one move at the end. Raises EngineError and OSError."""
    config = parse_config(source)
    if config.quant is not None:
        raise ModelError(f"{source} holds {config.quant} weights already: take the checkpoint it was made of")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} is there already: choose another place with --out")
    require_space(out.parent, config, quant)
    part = out.with_name(f".{out.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        report = write(source, part, config, quant, threads, progress)
        if out.is_dir():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return report


def write(
    source: Path, part: Path, config: ModelConfig, quant: Quant, threads: int, progress: Progress
) -> Report:
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    packing = packing_for(quant, dtype, threads)
    shards = ShardWriter(part)
    checkpoint = Checkpoint(source, REFERENCE, dtype, CPU, progress)
    quantizer = Quantizer(checkpoint, quant, packing, shards)
    build_model(config, quantizer)
    shards.finish()
    take_along(source, part)
    raw = read_json(source / "config.json")
    raw["quantization_config"] = entry_in_config(quant)
    (part / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    sync(part)
    worst = sorted(quantizer.errors, key=lambda each: -each.relative)[:WORST]
    return Report(
        format=quant.name,
        bytes_before=sum(entry.nbytes for entry in list_tensors(source).values()),
        bytes_after=sum(entry.nbytes for entry in list_tensors(part).values()),
        relative=quantizer.relative,
        worst=worst,
        tensors=len(quantizer.errors),
        kept=quantizer.kept,
    )


def packing_for(quant: Quant, dtype: torch.dtype, threads: int) -> Packing:
    try:
        packing = select_ops(CPU, dtype, dtype, threads, quant).packing
    except QuantUnavailable as error:
        raise DeviceError(f"{error}: see `llmbox doctor`") from None
    assert packing is not None
    return packing


def importance(weight_OI: Tensor, group: int) -> Tensor:
    """What the search for scales multiplies squared errors by: |w| + the root mean square of its group."""
    outputs, inputs = weight_OI.shape
    groups = torch.nn.functional.pad(weight_OI, (0, -inputs % group)).view(outputs, -1, group)
    typical = groups.square().mean(-1, keepdim=True).sqrt()
    return (groups.abs() + typical).flatten(1)[:, :inputs]


def stored(rounded: Rounded) -> Tensor:
    """Codes as a checkpoint holds them (`rounded.py`)."""
    if rounded.quant.bits == 8:
        return rounded.codes_OI
    codes = (rounded.codes_OI + 8).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2), value=8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def require_space(folder: Path, config: ModelConfig, quant: Quant) -> None:
    """An upper bound: all weights with a byte or half of one, tables and norms as they were."""
    while not folder.exists():
        folder = folder.parent
    tables = config.vocab_size * config.hidden_size * 2
    need = int(config.num_parameters * quant.bytes_per_weight) + tables * 4 + DISK_RESERVE
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(f"{folder} has {free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are needed")


def take_along(source: Path, target: Path) -> None:
    """Tokenizer, templates, defaults: everything beside the weights, as files of its own."""
    for file in source.iterdir():
        if file.suffix in WEIGHTS or file.name in {INDEX, "config.json"} or not file.is_file():
            continue
        if not file.name.startswith(".") and file.stat().st_size <= LARGEST_COPY:
            shutil.copyfile(file, target / file.name)


def sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def measure(source: Path, out: Path, text: Path, threads: int, report: Report) -> None:
    sequences = sequences_of(source, text.read_text(encoding="utf-8"))
    report.perplexity_before = perplexity(load_engine(config_for(source, threads), lambda _: None), sequences)
    report.perplexity_after = perplexity(load_engine(config_for(out, threads), lambda _: None), sequences)


def main() -> int:
    parser = argparse.ArgumentParser(prog="llmbox quantize")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--eval", type=Path)
    parser.add_argument("--threads", type=int, default=read_cpu().cores)
    options = parser.parse_args()

    def tell(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()

    try:
        report = quantize(
            options.source,
            options.out,
            QUANTS[options.format],
            options.threads,
            lambda done, total: tell({"progress": [done, total]}),
        )
        if options.eval is not None:
            measure(options.source, options.out, options.eval, options.threads, report)
    except (EngineError, OSError, ValueError) as error:
        tell({"error": {"code": getattr(error, "code", "failed"), "message": str(error)}})
        return 1
    tell({"report": asdict(report)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
