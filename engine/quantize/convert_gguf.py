"""Convert a GGUF file to a safetensors checkpoint: writes a directory that loads by itself, and a report.

`python -P -m llmbox.engine.quantize.convert_gguf FILE OUT FORMAT [--beside FOLDER] [--threads N]` reports
progress as `ipc/spawn.py` describes: {"progress": [done, total]}…, then a `ConversionReport`. FORMAT
is none or a format of `quantize.py`. The files in FOLDER, those of the tokenizer, are copied to OUT.
"""

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ..light_torch import import_torch_or_restart

if __name__ == "__main__":
    import_torch_or_restart()

import torch

from llmbox.kernels.quant_formats import QUANTS, Quant

from ..checkpoint.index import list_tensors
from ..checkpoint.quantized_layout import FORMATS, entry_in_config
from ..checkpoint.tensor_io import ShardWriter, atomic_directory, require_free_space
from ..errors import ModelError
from ..gguf.architectures import architecture_of
from ..gguf.config import config_of, dtype_of, generation_of, rope_factors
from ..gguf.reader import BLOCKS, GgufFile, read_gguf
from ..gguf.tensors import GgufTensors
from ..hardware.machine import read_cpu
from ..ipc.spawn import ReportProgress, run_job
from ..model.registry import build_model
from ..model_config.config import parse_config
from .quantize import DISK_RESERVE, Progress, packing_for
from .quantizer import Quantizer


@dataclass(slots=True)
class ConversionReport:
    """Result of a conversion, for the command line."""

    format: str
    """Target format; none: nothing was requantized."""
    bytes_before: int
    bytes_after: int
    relative: float
    """Relative error of requantization, in the Euclidean norm of the file's weights."""
    tensors: int
    kept: int


def convert(
    gguf: GgufFile, out: Path, quant: Quant | None, beside: Path | None, threads: int, progress: Progress
) -> ConversionReport:
    """Convert to the directory `out`, which must not exist and appears atomically at the end.

    Raises EngineError and OSError.
    """
    raw = config_of(gguf, rope_factors(gguf))
    if architecture_of(gguf).is_encoder:
        raise ModelError(f"{gguf.path}: files of encoders are served as they are, and not converted")
    raw["num_nextn_predict_layers"] = 0
    require_free_space(out, bytes_at_most(gguf, quant))
    with atomic_directory(out) as part:
        (part / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        config = parse_config(part)
        packing = None if quant is None else packing_for(quant, torch.float32, threads)
        torch.set_num_threads(threads)  # the kernels have left torch one
        shards = ShardWriter(part)
        tensors = GgufTensors(gguf, config.num_heads, config.num_kv_heads, progress)
        quantizer = Quantizer(tensors, quant, packing, shards)
        build_model(config, quantizer, quant)
        shards.finish()
        if quant is not None:
            raw["quantization_config"] = entry_in_config(quant)
            (part / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        (part / "generation_config.json").write_text(
            json.dumps(generation_of(gguf), indent=2) + "\n", encoding="utf-8"
        )
        if beside is not None:
            shutil.copytree(beside, part, dirs_exist_ok=True)
        return ConversionReport(
            format="none" if quant is None else quant.name,
            bytes_before=sum(entry.nbytes for entry in gguf.tensors.values()),
            bytes_after=sum(entry.nbytes for entry in list_tensors(part).values()),
            relative=quantizer.relative,
            tensors=len(quantizer.errors),
            kept=quantizer.kept,
        )


def bytes_at_most(gguf: GgufFile, quant: Quant | None) -> int:
    """Return an upper bound of the output's size in bytes, with a reserve."""
    entries = gguf.tensors.values()
    weights = sum(entry.nbytes // BLOCKS[entry.dtype][1] * BLOCKS[entry.dtype][0] for entry in entries)
    wide = 4.0 if dtype_of(gguf) == "float32" else 2.0
    if quant is None:
        return int(weights * wide) + DISK_RESERVE
    tables = 2 * prod(gguf.tensors["token_embd.weight"].shape)
    return int(weights * quant.bytes_per_weight + tables * wide) + DISK_RESERVE


def main() -> int:
    parser = argparse.ArgumentParser(prog="llmbox import")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("format", choices=("none", *FORMATS))
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--threads", type=int, default=read_cpu().cores)
    options = parser.parse_args()

    def work(report: ReportProgress) -> ConversionReport:
        return convert(
            read_gguf(options.source),
            options.out,
            None if options.format == "none" else QUANTS[options.format],
            options.beside,
            options.threads,
            lambda done, total: report({"progress": [done, total]}),
        )

    return run_job(work)


if __name__ == "__main__":
    sys.exit(main())
