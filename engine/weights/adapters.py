"""LoRA adapters beside the linears of a model: which tensor belongs where, and loading into slots.

`AdapterLayers` notes each linear while the model is built, and has operations that add what adapters have.
T rows of the step, I inputs, O outputs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmbox.kernels.lora import (
    TILE_ROWS,
    AdaptedRows,
    ExpertAdapters,
    ExpertLora,
    LoraOps,
    LoraRows,
    LoraTiles,
)
from llmbox.kernels.op_types import ExpertResults, Mixture
from llmbox.kernels.ops import Ops, PackedLinear

from ..checkpoint.adapter import Adapter, AdapterError, AdapterTarget, bytes_in_memory, plain_name
from ..checkpoint.safetensors import TensorEntry, shown
from ..errors import ModelError
from .adapter_weights import (
    AdaptedExperts,
    AdaptedLinear,
    AdapterReader,
    AdapterShare,
    ExpertStack,
    cut,
    is_held_elsewhere,
    unknown_module,
    weights_of,
    wrong_base,
)
from .source import WeightRequest

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
USUAL_RANK = 16
PADDING = 16
"""One part in so many of an adapter's memory is added for what is padded: ranks, panels and headers."""
MERGE_FIRST = "`llmbox lora merge` writes a model of both"
NO_ROOM = (
    "no memory of the GPU is left for the adapter: unload the model and load it again, and its plan includes "
    "--lora-memory"
)


class AdapterLayers:
    """Linears of one rank's model, by the names that adapters have for them."""

    def __init__(self, ops: Ops) -> None:
        assert ops.lora is not None
        self._base = ops
        self._lora: LoraOps = ops.lora
        self.takes_tiles = ops.lora.takes_tiles
        self.ops = replace(
            ops,
            linear=self._linear,
            logits=self._logits,
            linear_in_shares=self._linear_in_shares if ops.linear_in_shares else None,
            embedding=self._embedding,
            experts=self._mix_experts,
            expert_results=None if ops.expert_results is None else self._expert_results,
        )
        self.rows: AdaptedRows | None = None
        """Rows of the step that runs or is recorded, where some have an adapter."""
        self._linears: dict[int, AdaptedLinear] = {}
        """By the id of the packed weights, which it keeps."""
        self._outputs: dict[str, AdaptedLinear] = {}
        """By the name of each output."""
        self._stacks: dict[str, Mapping[str, int]] = {}
        self._fixed: set[str] = set()
        """Weights that no adapter changes: absorbed linears, and experts in main memory."""
        self._apart: dict[int, tuple[WeightRequest, PackedLinear]] = {}
        """Linears of experts and routers, by the id of the packed weights."""
        self._experts: dict[str, AdaptedExperts] = {}
        """By the name that holds all experts of a layer."""
        self._mixtures: dict[int, AdaptedExperts] = {}
        self._stacks_of: dict[int, tuple[ExpertStack, int]] = {}
        """Stack and number of each expert's linears, by the id of the packed weights."""
        self._skipped: list[str] = []
        self._held: dict[str, Sequence[int]] = {}
        """Experts of a layer that this rank has, where others have the rest."""
        self._heads: dict[int, PackedLinear] = {}
        """Whole heads by slot."""

    # ------------------------------------------------------------------ while the model is built

    def note(self, asked: WeightRequest, packed: PackedLinear) -> None:
        """Remember a weight that the model was given."""
        names = {plain_name(name): name for name in asked.outputs}
        if asked.kind in {"experts", "router"} or any(".experts." in name for name in names):
            self._fixed |= names.keys()
            self._apart[id(packed)] = asked, packed
            return
        linear = self._linears[id(packed)] = AdaptedLinear(asked, packed)
        self._outputs |= dict.fromkeys(names, linear)
        if asked.kind == "tied":
            self._outputs[HEAD] = linear

    def note_split(self, name: str, parts: Mapping[str, int]) -> None:
        self._stacks[plain_name(name)] = {plain_name(part): rows for part, rows in parts.items()}

    def note_experts(
        self, name: str, mixture: Mixture, routers: Sequence[PackedLinear], *, turned: bool
    ) -> None:
        """Remember a layer's experts and routers, which `note` has seen before."""
        for router in routers:
            asked, _ = self._apart[id(router)]
            linear = self._linears[id(router)] = AdaptedLinear(asked, router)
            self._outputs |= {plain_name(each): linear for each in asked.outputs}
        if self._base.host_experts is not None:
            self._fixed.add(plain_name(name))
            return
        requests = {key: asked for key, (asked, _) in self._apart.items()}
        found = AdaptedExperts.of(mixture, requests, turned=turned)
        self._experts[plain_name(name)] = self._mixtures[id(mixture)] = found
        self._stacks_of |= found.numbers
        found.rename(self._outputs)

    def rename_experts(self, mixture: Mixture) -> None:
        """Follow experts that changed places (`Mixture.place`): linears have the names of those they hold."""
        if (found := self._mixtures.get(id(mixture))) is not None:
            found.rename(self._outputs)

    def note_skip(self, name: str) -> None:
        self._skipped.append(name)

    def note_held(self, name: str, held: Sequence[int]) -> None:
        self._held[plain_name(name)] = held

    @property
    def launches(self) -> int:
        """Return `LoraOps.launches`."""
        return self._lora.launches()

    @property
    def changes_head(self) -> bool:
        """Return True if logits of some adapter in memory are not those of the model's head."""
        head = self._outputs.get(HEAD)
        return bool(self._heads) or (head is not None and bool(head.site.weights))

    def group(self, slots_T: Iterable[tuple[int, range]], device: torch.device) -> AdaptedRows | None:
        """Return (slot, rows) as the operations take them; None where no row has an adapter."""
        if not self.takes_tiles:
            return LoraRows.of(slots_T)
        numbers = LoraTiles.numbers(slots_T)
        if not numbers:
            return None
        tiles = torch.tensor(numbers, dtype=torch.int32, device=device)
        return LoraTiles(tiles.view(-1, 1 + TILE_ROWS), numbers)

    # ------------------------------------------------------------------ operations

    @contextmanager
    def applied(self, rows: AdaptedRows | None) -> Iterator[None]:
        """Apply adapters to these rows inside."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None

    def _linear(self, packed: PackedLinear, x_TI: Tensor) -> Tensor:
        return self._adapted(packed, x_TI, self._base.linear(packed, x_TI))

    def _linear_in_shares(self, packed: PackedLinear, x_TI: Tensor, ranks: int) -> Tensor:
        assert self._base.linear_in_shares is not None
        return self._adapted(packed, x_TI, self._base.linear_in_shares(packed, x_TI, ranks))

    def _adapted(self, packed: PackedLinear, x_TI: Tensor, out_TO: Tensor) -> Tensor:
        if self.rows is not None:
            self._add(packed, x_TI, out_TO, self.rows)
        return out_TO

    def _logits(self, packed: PackedLinear, x_TI: Tensor) -> Tensor:
        out_TO = self._base.logits(packed, x_TI)
        head = self._outputs.get(HEAD) if self._heads else None
        if self.rows is not None and head is not None and head.packed is packed:
            for slot, index in self.rows.runs():
                if (own := self._heads.get(slot)) is not None:
                    out_TO[index] = self._base.logits(own, x_TI[index]).to(out_TO.dtype)
        return self._adapted(packed, x_TI, out_TO)

    def _embedding(self, table: PackedLinear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
        out_TE = self._base.embedding(table, ids_T, scale)
        if self.rows is not None and (linear := self._linears.get(id(table))) is not None:
            self._lora.embed(linear.table, ids_T, out_TE, scale, self.rows)
        return out_TE

    def _mix_experts(self, mixture: Mixture, *inputs: Any, **more: Any) -> Tensor:
        more["adapters"] = self._of_mixture(mixture)
        return self._base.experts(mixture, *inputs, **more)

    def _expert_results(self, mixture: Mixture, *inputs: Any, **more: Any) -> ExpertResults:
        assert self._base.expert_results is not None
        more["adapters"] = self._of_mixture(mixture)
        return self._base.expert_results(mixture, *inputs, **more)

    def _of_mixture(self, mixture: Mixture) -> ExpertAdapters | None:
        found = self._mixtures.get(id(mixture))
        if self.rows is None or found is None:
            return None
        return ExpertAdapters(found.gate_ups.site, found.downs.site, self.rows)

    def _add(self, packed: PackedLinear, x_TI: Tensor, out_TO: Tensor, rows: AdaptedRows) -> None:
        if (linear := self._linears.get(id(packed))) is not None:
            self._lora.add(linear.site, x_TI, out_TO, rows)

    # ------------------------------------------------------------------ adapters

    def match(self, adapter: Adapter) -> None:
        """Raise AdapterError unless every tensor belongs to this model and can be applied beside it."""
        if adapter.is_dora:
            raise AdapterError(
                f"{adapter.directory} is a DoRA adapter, whose magnitudes need the base's own weights: "
                f"{MERGE_FIRST}"
            )
        claimed = self.claimed_experts(adapter)
        for target in adapter.targets.values():
            if target.parameters:
                continue
            for share in self._shares(target):
                one = self._stacks_of.get(id(share.linear.packed))
                if one is not None and id(one[0]) in claimed:
                    raise AdapterError(
                        f"{target.a.file}: tensor {shown(target.a.name)}: another tensor adapts all experts "
                        "of the layer"
                    )
        for name, entry in adapter.saved.items():
            self._saved(name, entry)

    def claimed_experts(self, adapter: Adapter) -> dict[int, tuple[ExpertStack, AdapterTarget]]:
        """Return the stacks of which a target adapts all experts, by id. Raises AdapterError."""
        claimed: dict[int, tuple[ExpertStack, AdapterTarget]] = {}
        for target in adapter.targets.values():
            if (stack := self._expert_stack(target)) is not None:
                if id(stack) in claimed:
                    raise AdapterError(
                        f"{target.a.file}: tensor {shown(target.a.name)}: another tensor adapts the same "
                        "experts"
                    )
                claimed[id(stack)] = stack, target
        return claimed

    def load(self, slot: int, adapter: Adapter, dtype: torch.dtype) -> int:
        """Read an adapter into a free slot. Returns its bytes. Raises AdapterError, with the slot free."""
        self.match(adapter)
        try:
            with AdapterReader(dtype) as reader:
                return self._read(slot, adapter, reader)
        except OSError as error:
            self.unload(slot)
            raise AdapterError(f"{adapter.directory} cannot be read: {error.strerror or error}") from None
        except ModelError as error:
            self.unload(slot)
            raise AdapterError(str(error)) from None
        except torch.OutOfMemoryError:
            self.unload(slot)
            raise AdapterError(NO_ROOM) from None

    def unload(self, slot: int) -> None:
        self._heads.pop(slot, None)
        for linear in self._linears.values():
            self._lora.unload(linear.site, slot)
            self._lora.unload(linear.table, slot)
        for found in self._experts.values():
            self._lora.unload(found.gate_ups.site, slot)
            self._lora.unload(found.downs.site, slot)
        self._lora.release(slot)

    def prepare(self, dtype: torch.dtype, nbytes: int = 0) -> None:
        """Have memory ready for an adapter that takes so many bytes; 0: of rank 16, on all linears."""
        if not nbytes:
            linears = [each for each in self._linears.values() if ".layers." in each.asked.name]
            numbers = USUAL_RANK * sum(each.numbers for each in linears)
            nbytes = bytes_in_memory(numbers, dtype.itemsize, is_int8=self._lora.is_int8)
        self._lora.prepare(nbytes + nbytes // PADDING)

    def _read(self, slot: int, adapter: Adapter, reader: AdapterReader) -> int:
        """Load an adapter. Return its bytes in memory."""
        taken = adapter.memory_bytes(reader.dtype.itemsize, is_int8=self._lora.is_int8)
        self._lora.reserve(slot, taken + taken // PADDING)
        by_linear: dict[int, list[AdapterShare]] = {}
        by_stack: dict[int, tuple[ExpertStack, list[ExpertLora]]] = {}
        for target in adapter.targets.values():
            if (stack := self._expert_stack(target)) is not None:
                by_stack[id(stack)] = stack, [stack.read_all(target, reader)]
            if target.parameters:
                continue
            for share in self._shares(target):
                by_linear.setdefault(id(share.linear.packed), []).append(share)
        for key, shares in by_linear.items():
            if key in self._stacks_of:
                stack, number = self._stacks_of[key]
                _, batches = by_stack.setdefault(id(stack), (stack, []))
                batches.append(stack.read_one(number, shares, reader))
                continue
            self._lora.load(shares[0].linear.site, slot, weights_of(shares, reader))
        for stack, batches in by_stack.values():
            self._lora.load_experts(stack.site, slot, len(stack.linears), batches)
        for name, entry in adapter.saved.items():
            if (found := self._saved(name, entry)) is None:
                continue
            rows = found.asked.outputs[found.stored_name(name)]
            table_VE = cut(reader.read(entry), rows, 0)
            if name == HEAD:
                self._heads[slot] = self._base.pack_router(table_VE.to(device=self._lora.device), None)
            else:
                self._lora.load_table(found.table, slot, table_VE)
        return taken

    def _shares(self, target: AdapterTarget) -> Iterator[AdapterShare]:
        """Return where a target's outputs go; nothing for layers that are not here. Raises AdapterError."""
        for name, first, rows in self._parts(target.name, 0, target.shape[0]):
            linear = self._outputs.get(name)
            if linear is None:
                if self._is_skipped(name):
                    continue
                raise self._unknown(name, target.b)
            asked = linear.asked
            outputs = asked.outputs[linear.stored_name(name)]
            expected = outputs.total, asked.inputs.total
            if (rows, target.shape[1]) != expected:
                entry = target.a if target.shape[1] != expected[1] else target.b
                raise wrong_base(target.name, entry, target.shape, expected)
            yield AdapterShare(linear, linear.stored_name(name), target, first)

    def _expert_stack(self, target: AdapterTarget) -> ExpertStack | None:
        """Return where a target of all experts goes; None for others. Raises AdapterError."""
        if not target.parameters:
            return None
        name = target.name.removesuffix(".base_layer")
        found = self._experts.get(name)
        if found is None:
            if self._is_skipped(name):
                return None
            raise self._unknown(name, target.b)
        stack = found.stack_of(target)
        if stack is None:
            raise wrong_base(name, target.a, target.shape, found.gate_ups.shape)
        return stack

    def _parts(self, name: str, first: int, rows: int) -> Iterator[tuple[str, int, int]]:
        """Return (name, first row, rows) of the outputs that a stored stack consists of."""
        parts = self._stacks.get(name)
        if name in self._outputs or not parts:
            yield name, first, rows
            return
        total = sum(parts.values())
        for part, size in parts.items():
            # A stack of another size is refused with the shape of its first part.
            yield from self._parts(part, first, size if total == rows else rows)
            first += size

    def parts_of(self, name: str) -> dict[str, tuple[int, int]]:
        """Return (first row, rows) of each linear that a stored stack consists of; empty for other names."""
        parts, first = {}, 0
        for part, rows in self._stacks.get(name, {}).items():
            parts[part] = first, rows
            first += rows
        return parts

    def _saved(self, name: str, entry: TensorEntry) -> AdaptedLinear | None:
        if name not in {EMBEDDING, HEAD}:
            raise AdapterError(
                f"{entry.file}: tensor {shown(entry.name)}: {name} is saved whole, and only embed_tokens and "
                f"lm_head are read so: {MERGE_FIRST}"
            )
        if (linear := self._outputs.get(name)) is None:
            if self._is_skipped(name):
                return None
            raise self._unknown(name, entry)
        rows = linear.asked.outputs[linear.stored_name(name)]
        expected = rows.total, linear.asked.inputs.total
        if entry.shape != expected:
            raise wrong_base(name, entry, entry.shape, expected)
        return linear

    def _is_skipped(self, name: str) -> bool:
        return is_held_elsewhere(name, self._held) or any(
            f"{name}.".startswith(plain_name(each[:-1]) + ".")
            if each.endswith(".")
            else plain_name(each.removesuffix(".weight")) == name
            for each in self._skipped
        )

    def _unknown(self, name: str, entry: TensorEntry) -> AdapterError:
        if name in self._fixed:
            what = "experts in main memory" if ".experts" in name else "absorbed linears"
            reason = f"adapters of {what} are not applied beside a model: {MERGE_FIRST}"
            return AdapterError(f"{entry.file}: tensor {shown(entry.name)}: {reason}")
        return unknown_module(name, entry)
