"""Check a LoRA adapter against its base, or merge both into a model folder that loads by itself.

`python -P -m llmbox.engine.quantize.merge_adapter BASE ADAPTER [--out DIR]` reports as
`ipc/spawn.py` describes: {"progress": [done, total]}…, then an `AdapterReport`.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..light_torch import import_torch_or_restart

if __name__ == "__main__":
    import_torch_or_restart()

import torch
from torch import Tensor

from llmbox.kernels.ops import PackedLinear
from llmbox.kernels.reference import REFERENCE

from ..checkpoint.adapter import Adapter, AdapterError, AdapterTarget, plain_name, read_adapter
from ..checkpoint.files import read_json
from ..checkpoint.index import list_tensors
from ..checkpoint.safetensors import TensorEntry
from ..checkpoint.tensor_io import (
    DTYPES,
    ROUNDED_DTYPES,
    ShardWriter,
    atomic_directory,
    require_free_space,
    split_stack,
)
from ..distributed.communicator import SINGLE, TensorParallel
from ..errors import ModelError
from ..ipc.spawn import ReportProgress, run_job
from ..model.decoder import Decoder
from ..model.registry import build_model
from ..model_config.config import ModelConfig, parse_config
from ..weights.adapter_weights import AdapterReader, ExpertAdditions, unknown_module, wrong_base
from ..weights.adapters import EMBEDDING, HEAD, AdapterLayers
from ..weights.source import WeightRequest
from .quantize import DISK_RESERVE, copy_side_files

WIDE = torch.float32
Progress = Callable[[int, int], None]
Stacks = Mapping[str, tuple[Sequence[str], bool]]
"""Linears of all experts of a layer that the base may store as one tensor, by its name, and whether they are
transposed there.
"""


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Facts of an adapter that fits its base."""

    rank: int
    targets: int
    nbytes: int


def check_adapter(base: Path, folder: Path) -> AdapterReport:
    """Check that an adapter can be applied beside its base, as loading would. Raises EngineError."""
    adapter = read_adapter(folder)
    config = parse_config(base)
    if config.is_bidirectional:
        raise AdapterError(f"{base} is an encoder: adapters for it are not supported")
    _adapted_layers(config)[0].match(adapter)
    reader = AdapterReader(WIDE)  # each number is finite: of several ranks some read only their layers
    for target in adapter.targets.values():
        reader.read(target.a)
        reader.read(target.b)
    for entry in adapter.saved.values():
        reader.read(entry)
    return _report(adapter)


def _adapted_layers(config: ModelConfig) -> tuple[AdapterLayers, Stacks]:
    source = ShapeSource()
    model = build_model(config, source)
    assert isinstance(model, Decoder)
    assert model.adapters is not None
    return model.adapters, source.stacks


def merge(base: Path, folder: Path, out: Path, progress: Progress) -> AdapterReport:
    """Write the base with the adapter added to its weights to `out`, which must not exist and appears
    atomically. Raises EngineError and OSError.
    """
    adapter = read_adapter(folder)
    config = parse_config(base)
    if config.stored is not None or not any(base.glob("*.safetensors")):
        raise ModelError(
            f"{base} has quantized weights: merge into the original checkpoint, then quantize that"
        )
    entries = list_tensors(base)
    total = sum(entry.nbytes for entry in entries.values())
    require_free_space(out, total + adapter.nbytes + DISK_RESERVE)
    layers, stacks = (None, {}) if config.is_bidirectional else _adapted_layers(config)
    merger = _Merger(adapter, entries, layers, stacks, tied=config.tie_word_embeddings)
    with atomic_directory(out) as part:
        shards, done = ShardWriter(part), 0
        for name, entry in entries.items():
            shards.add(merger.merged(name, entry))
            done += entry.nbytes
            progress(done, total)
        merger.finish()
        shards.finish()
        copy_side_files(base, part)
        raw = read_json(base / "config.json")
        if merger.is_untied:
            raw["tie_word_embeddings"] = False
            if isinstance(text := raw.get("text_config"), dict):
                text["tie_word_embeddings"] = False
        (part / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return _report(adapter)


def _report(adapter: Adapter) -> AdapterReport:
    return AdapterReport(adapter.rank, len(adapter.targets) + len(adapter.saved), adapter.nbytes)


class ShapeSource:
    """`WeightSource` without weights: a model over it has all its linears and computes nothing."""

    ops = REFERENCE
    dtype = WIDE
    device = torch.device("meta")
    rank: TensorParallel = SINGLE

    def __init__(self) -> None:
        self.stacks: dict[str, tuple[Sequence[str], bool]] = {}

    def vector(self, name: str, size: int) -> Tensor:  # noqa: ARG002
        return torch.empty(size, device=self.device)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        return torch.empty(shape, device=self.device)

    def packed(self, asked: WeightRequest) -> PackedLinear:
        return asked

    def split(self, *_: object, **__: object) -> None: ...
    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        self.stacks[plain_name(name)] = parts, transposed

    def skip(self, *_: object) -> None: ...
    def skip_experts(self, *_: object) -> None: ...
    def finish(self) -> None: ...


class _Merger:
    """Adds an adapter to the tensors of a checkpoint, one at a time."""

    def __init__(
        self,
        adapter: Adapter,
        entries: Mapping[str, TensorEntry],
        layers: AdapterLayers | None,
        stacks: Stacks,
        *,
        tied: bool,
    ) -> None:
        self._adapter = adapter
        self._layers, self._stacks = layers, stacks
        self._experts = ExpertAdditions(layers.claimed_experts(adapter).values() if layers else ())
        self._left = set(adapter.targets) | set(adapter.saved)
        changed = {HEAD, EMBEDDING} & self._left
        self.is_untied = tied and bool(changed)
        """True if a tied head is written separately, as it or the embedding changes."""
        self._has_head = any(plain_name(_module(name)) == HEAD for name in entries)

    def merged(self, name: str, entry: TensorEntry) -> dict[str, Tensor]:
        """Return what is written for a tensor of the base."""
        dtype = (ROUNDED_DTYPES | DTYPES)[entry.dtype]
        stored = AdapterReader(dtype).read(entry)
        module = plain_name(_module(name))
        if entry.dtype not in DTYPES:
            return {name: stored}
        if (stack := self._stacks.get(module)) is not None:
            return {name: self._changed_stack(entry, stored, *stack)}
        if not name.endswith(".weight"):
            return {name: stored}
        tensors = {name: self._changed(module, stored)}
        if module == EMBEDDING and self.is_untied and not self._has_head:
            head = f"{HEAD}.weight"
            tensors[head] = self._changed(HEAD, stored).clone()
        return tensors

    def _changed_stack(
        self, entry: TensorEntry, stored: Tensor, parts: Sequence[str], transposed: bool
    ) -> Tensor:
        """Change the linears of a tensor that holds those of all experts."""
        split_stack(entry, parts, transposed=transposed)  # raises where there are not so many
        for number, name in enumerate(parts):
            weight_OI = stored[number].T if transposed else stored[number]
            weight_OI.copy_(self._changed(plain_name(name), weight_OI))
        return stored

    def _changed(self, module: str, weight_OI: Tensor) -> Tensor:
        shape = tuple(weight_OI.shape)
        if (saved := self._adapter.saved.get(module)) is not None:
            self._left.discard(module)
            if saved.shape != shape:
                raise wrong_base(module, saved, saved.shape, shape)
            weight_OI = AdapterReader(weight_OI.dtype).read(saved)
        if (target := self._adapter.targets.get(module)) is not None:
            self._left.discard(module)
            if target.shape != shape:
                wrong = target.a if target.shape[1:] != shape[1:] else target.b
                raise wrong_base(module, wrong, target.shape, shape)
            weight_OI = _added(weight_OI, target)
        if (target := self._experts.target_of(module)) is not None:
            self._left.discard(target.name)
            addition_OI = self._experts.addition(module)
            if addition_OI.shape != shape:
                raise wrong_base(module, target.b, addition_OI.shape, shape)
            weight_OI = _rounded(weight_OI.to(WIDE) + addition_OI, weight_OI, target)
        return self._changed_parts(module, weight_OI)

    def _changed_parts(self, module: str, weight_OI: Tensor) -> Tensor:
        """Add what the adapter has for single linears of a stack that the base stores as one tensor."""
        parts = self._layers.parts_of(module) if self._layers else {}
        for part, (first, rows) in parts.items():
            if part in self._adapter.targets or self._experts.target_of(part) is not None:
                weight_OI = weight_OI.clone()
                rows_OI = weight_OI[first : first + rows]
                rows_OI.copy_(self._changed(part, rows_OI))
        return weight_OI

    def finish(self) -> None:
        """Raise AdapterError for a tensor that has no place in the base."""
        for name in sorted(self._left):
            target = self._adapter.targets.get(name)
            raise unknown_module(name, self._adapter.saved[name] if target is None else target.b)


def _added(weight_OI: Tensor, target: AdapterTarget) -> Tensor:
    reader = AdapterReader(WIDE)
    sum_OI = weight_OI.to(WIDE) + target.scale * (reader.read(target.b) @ reader.read(target.a))
    if target.magnitude is not None:
        lengths_O = torch.linalg.vector_norm(sum_OI, dim=1)
        sum_OI *= (reader.read(target.magnitude).flatten() / lengths_O).unsqueeze(1)
    return _rounded(sum_OI, weight_OI, target)


def _rounded(sum_OI: Tensor, weight_OI: Tensor, target: AdapterTarget) -> Tensor:
    """Return a sum in the dtype of the weights. Raises AdapterError."""
    changed_OI = sum_OI.to(weight_OI.dtype)
    if not math.isfinite(float(changed_OI.abs().max())):
        raise AdapterError(f"{target.b.file}: {target.name} would hold numbers that are not finite")
    return changed_OI


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def main() -> int:
    parser = argparse.ArgumentParser(prog="llmbox lora")
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    def work(report: ReportProgress) -> Any:
        if options.out is None:
            return check_adapter(options.base, options.adapter)
        progress = lambda done, total: report({"progress": [done, total]})  # noqa: E731 - as other jobs
        return merge(options.base, options.adapter, options.out, progress)

    return run_job(work)


if __name__ == "__main__":
    sys.exit(main())
