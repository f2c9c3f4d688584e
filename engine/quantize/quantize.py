"""Quantize a checkpoint to integers: writes a directory that loads by itself, and a report.

`python -P -m llmbox.engine.quantize.quantize SOURCE OUT FORMAT [--calibrate] [--eval FILE] [--threads N]`
reports progress as `ipc/spawn.py` describes: {"writing": [done, total]}… and {"progress": [done,
total]}…, then a `QuantizationReport`. `checkpoint/quantized_layout.py` describes the stored format.

The kernels define the rounding (`Packing.round`): a checkpoint made here holds the same integers that
`--quant` would make at load. With `--calibrate` the model first generates a text, and GPTQ minimizes the
error of each linear's outputs on that text (`engine/quantize/quantizer.py`).
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..light_torch import import_torch_or_restart

if __name__ == "__main__":
    import_torch_or_restart()

import torch

from llmbox.kernels.dispatch import QuantUnavailable, select_ops
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.weight_packing import Packing

from ..checkpoint.files import read_json
from ..checkpoint.index import INDEX, list_tensors
from ..checkpoint.names import names_in_files, nemotron_h_name
from ..checkpoint.quantized_layout import COMPRESSED_FORMATS, FORMATS, entry_in_config
from ..checkpoint.tensor_io import ShardWriter, atomic_directory, require_free_space
from ..errors import DeviceError, ModelError
from ..executor.build import load_engine
from ..hardware.machine import read_cpu
from ..ipc.spawn import ReportProgress, run_job
from ..model.registry import build_model
from ..model_config.config import ModelConfig, parse_config
from ..model_config.encoders.config import POOLING_FILE
from ..weights.checkpoint import Checkpoint
from .calibration import Calibration, config_for, generate_calibration_text, perplexity, sequences_of
from .compressed_tensors import TARGETS, CompressedTarget
from .quantizer import Quantizer, TensorError

CPU = torch.device("cpu")
DISK_RESERVE = 512_000_000
WORST = 10
LARGEST_COPY = 64 << 20
"""Largest file beside the weights that is copied along, in bytes."""
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack"}

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class QuantizationReport:
    """Result of a quantization, for the command line."""

    format: str
    bytes_before: int = 0
    bytes_after: int = 0
    relative: float = 0.0
    """Relative error of all quantized weights together."""
    worst: list[TensorError] = field(default_factory=list)
    tensors: int = 0
    kept: int = 0
    """Unquantized tensors."""
    calibrated: int = 0
    """Tokens of the calibration text."""
    perplexity_before: float | None = None
    perplexity_after: float | None = None


def quantize(
    source: Path,
    out: Path,
    quant: Quant | CompressedTarget,
    threads: int,
    progress: Progress,
    writing: Progress | None = None,
) -> QuantizationReport:
    """Quantize `source` to the directory `out`, which must not exist and appears atomically at the end.

    `writing`: calibrate, and report progress of the calibration text. Raises EngineError and OSError.
    """
    config = parse_config(source)
    if config.stored is not None:
        raise ModelError(f"{source} holds {config.stored.label} weights already: use the original checkpoint")
    if config.is_bidirectional:
        raise ModelError(
            f"{source} makes vectors from both directions, and such checkpoints are not written: load it "
            "with --quant int8, which rounds its linears in memory"
        )
    if writing is not None and isinstance(quant, CompressedTarget) and quant.form != "pack-quantized":
        raise ModelError(
            f"{quant.name} has one scale an output, which is not calibrated: leave out --calibrate"
        )
    if writing is not None and config.experts is not None:
        raise ModelError(
            "a text hardly ever reaches some experts, so their weights cannot be calibrated: quantize "
            "without --calibrate"
        )
    uncommon = "recurrent layers" if config.recurrent else "layers of several sizes"
    if writing is not None and (config.recurrent or config.layer_sizes):
        raise ModelError(f"models with {uncommon} cannot be calibrated yet: quantize without --calibrate")
    target = None
    if isinstance(quant, CompressedTarget):
        target, quant = quant, quant.quant
    require_free_space(out, bytes_at_most(config, quant))
    with atomic_directory(out) as part:
        sequences = [] if writing is None else generate_calibration_text(source, threads, writing)
        return write(source, part, config, quant, threads, progress, sequences, target)


def write(
    source: Path,
    part: Path,
    config: ModelConfig,
    quant: Quant,
    threads: int,
    progress: Progress,
    sequences: list[list[int]],
    target: CompressedTarget | None = None,
) -> QuantizationReport:
    """Write the quantized checkpoint to `part`. `sequences`: calibration text; empty for plain rounding."""
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    packing = packing_for(quant if quant.on_cpu else QUANTS["int8"], dtype, threads)
    torch.set_num_threads(threads)  # the kernels have left torch one
    calibration = Calibration(source, config, dtype, sequences) if sequences else None
    name_of: Callable[[str], str] = nemotron_h_name if config.model_type == "nemotron_h" else str
    if target is not None and config.model_type != "nemotron_h":
        name_of = names_in_files(list_tensors(source))
    shards = ShardWriter(part, name_of=name_of)
    checkpoint = Checkpoint(source, REFERENCE, dtype, CPU, progress)
    kept = None if target is None else getattr(torch, config.dtype)
    quantizer = Quantizer(checkpoint, quant, packing, shards, calibration, target, kept)
    build_model(config, quantizer, quant)
    shards.finish()
    copy_side_files(source, part)
    raw = read_json(source / "config.json")
    raw["quantization_config"] = entry_in_config(quant)
    if target is not None:
        routers = None if config.experts is None else config.experts.module
        head = name_of("lm_head.weight").removesuffix(".weight")
        raw["quantization_config"] = target.entry(routers=routers, head=head)
    (part / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    worst = sorted(quantizer.errors, key=lambda each: -each.relative)[:WORST]
    return QuantizationReport(
        format=quant.name if target is None else target.name,
        bytes_before=sum(entry.nbytes for entry in list_tensors(source).values()),
        bytes_after=sum(entry.nbytes for entry in list_tensors(part).values()),
        relative=quantizer.relative,
        worst=worst,
        tensors=len(quantizer.errors),
        kept=quantizer.kept,
        calibrated=sum(map(len, sequences)),
    )


def packing_for(quant: Quant, dtype: torch.dtype, threads: int) -> Packing:
    try:
        packing = select_ops(CPU, dtype, dtype, threads, quant).packing
    except QuantUnavailable as error:
        raise DeviceError(f"{error}: see `llmbox doctor`") from None
    assert packing is not None
    return packing


def bytes_at_most(config: ModelConfig, quant: Quant) -> int:
    """Return an upper bound of the output's size: quantized weights, unquantized embeddings, a reserve."""
    tables = config.vocab_size * config.hidden_size * 2
    return int(config.num_parameters * quant.bytes_per_weight) + tables * 4 + DISK_RESERVE


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the files beside the weights: tokenizer, chat templates, generation defaults."""
    for file in source.iterdir():
        if file.suffix in WEIGHTS or file.name in {INDEX, "config.json"} or file.is_dir():
            continue
        if file.exists() and not file.is_file():
            raise ModelError(f"{file} is neither a regular file nor a folder: remove it")
        if file.is_file() and not file.name.startswith(".") and file.stat().st_size <= LARGEST_COPY:
            shutil.copyfile(file, target / file.name)
    if (source / POOLING_FILE).is_file():
        (target / POOLING_FILE).parent.mkdir()
        shutil.copyfile(source / POOLING_FILE, target / POOLING_FILE)


def measure(source: Path, out: Path, text: Path, threads: int, report: QuantizationReport) -> None:
    """Measure the perplexity of both checkpoints on a text."""
    sequences = sequences_of(source, text.read_text(encoding="utf-8"))
    report.perplexity_before = perplexity(load_engine(config_for(source, threads), lambda _: None), sequences)
    report.perplexity_after = perplexity(load_engine(config_for(out, threads), lambda _: None), sequences)


def main() -> int:
    parser = argparse.ArgumentParser(prog="llmbox quantize")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("format", choices=(*COMPRESSED_FORMATS, *FORMATS))
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--eval", type=Path)
    parser.add_argument("--threads", type=int, default=read_cpu().cores)
    options = parser.parse_args()

    def work(report: ReportProgress) -> QuantizationReport:
        result = quantize(
            options.source,
            options.out,
            TARGETS.get(options.format) or QUANTS[options.format],
            options.threads,
            lambda done, total: report({"progress": [done, total]}),
            (lambda done, total: report({"writing": [done, total]})) if options.calibrate else None,
        )
        if options.eval is not None:
            measure(options.source, options.out, options.eval, options.threads, result)
        return result

    return run_job(work)


if __name__ == "__main__":
    sys.exit(main())
