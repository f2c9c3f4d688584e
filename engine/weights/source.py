"""Requests of a model's layers for their weights, and the interface of what answers them.

The model requests what it needs, in its own order; `finish` then refuses tensors that were not requested.

    Weights         requests of the model's layers, under a name prefix
    WeightSource    origin of weights: `checkpoint.py` or `packed_cache/source.py`
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from llmbox.kernels.op_types import Mixture
from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.weight_packing import Kind

from ..checkpoint.safetensors import ShardSlice
from ..distributed.communicator import TensorParallel
from ..model_config.architecture import BIASED_NORMS
from ..model_config.config import ModelConfig
from ..model_config.shape import is_fine

if TYPE_CHECKING:
    from .adapters import AdapterLayers


def pack(ops: Ops, kind: Kind, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
    match kind:
        case "linear":
            return ops.pack_linear(weight_OI, bias_O)
        case "experts":
            assert ops.pack_experts is not None
            return ops.pack_experts(weight_OI, bias_O)
        case "head":
            return ops.pack_head(weight_OI, bias_O)
        case "router":
            return ops.pack_router(weight_OI, bias_O)
        case _:
            return ops.pack_embedding(weight_OI, kind == "tied")


@dataclass(frozen=True, slots=True)
class WeightRequest:
    """Request for one packed weight: `outputs` are tensors to stack, {full name without `.weight`: rows}.

    Rows and inputs select this rank's shard of each tensor.
    """

    kind: Kind
    outputs: Mapping[str, ShardSlice]
    inputs: ShardSlice
    bias: bool = False
    order: tuple[int, ...] | None = None
    """Row permutation: row i of the weight is row order[i] of the stack."""
    transposed: bool = False
    """True if inputs and outputs of the stored tensor change places."""
    on_host: bool = False
    """True for weights that `Ops.host_experts` computes, in main memory."""
    is_by_head: bool = False
    """True for weights of `Ops.linear_by_head`. They are asked for whole."""

    @property
    def name(self) -> str:
        """Name of the stack, unique in a model."""
        return "+".join(self.outputs)

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = sum(rows.size for rows in self.outputs.values()), self.inputs.size
        return (inputs, outputs) if self.transposed else (outputs, inputs)


class WeightSource(Protocol):
    """Origin of a model's weights; each tensor is requested once."""

    @property
    def ops(self) -> Ops: ...

    @property
    def rank(self) -> TensorParallel: ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the model computes."""
        ...

    @property
    def device(self) -> torch.device: ...

    def vector(self, name: str, size: int) -> Tensor: ...

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read the whole of a small tensor in float32, whatever the rank and the model's dtype."""
        ...

    def packed(self, asked: WeightRequest) -> PackedLinear: ...

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        """Declare that the checkpoint may store these linears, {name: rows}, stacked as `name`.weight."""
        ...

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        """Declare that the checkpoint may store these linears as one tensor `name`, [experts, O, I];
        `transposed`: [experts, I, O].
        """
        ...

    def skip(self, name: str) -> None:
        """Declare that `name` may exist and is not used; with a trailing dot: everything below it."""
        ...

    def skip_experts(self, name: str, held: Sequence[int]) -> None:
        """Declare that what is below `name`.N is another rank's, for each expert N that is not `held`."""
        ...

    def finish(self) -> None:
        """Raise ModelError for tensors that were not requested."""
        ...


class Weights:
    """Tensors under a name prefix; `at` goes deeper.

    `names`: modules that the checkpoint calls otherwise, or whole names. `mixed_layers`: number of layers
    of a model in mixed precision, whose linears of `is_fine` are packed like the output head. `adapters`
    gets all requests.
    """

    def __init__(
        self,
        source: WeightSource,
        prefix: str = "",
        names: Mapping[str, str] = MappingProxyType({}),
        mixed_layers: int = 0,
        adapters: "AdapterLayers | None" = None,
        mixtures: list[Mixture] | None = None,
    ) -> None:
        self.mixtures: list[Mixture] = [] if mixtures is None else mixtures
        """Mixtures of all layers so far, those below other prefixes included."""
        self._source = source
        self._adapters = adapters
        self._prefix = prefix
        self._names = names
        self._mixed_layers = mixed_layers

    @property
    def rank(self) -> TensorParallel:
        return self._source.rank

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return self._source.device

    def at(self, name: str) -> "Weights":
        prefix = f"{self._full(name)}."
        shared = self._mixed_layers, self._adapters, self.mixtures
        return Weights(self._source, prefix, self._names, *shared)

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.vector(self._full(name), size)

    def floats(self, name: str, *shape: int) -> Tensor:
        return self._source.floats(self._full(name), shape)

    def skip(self, name: str) -> None:
        self._source.skip(self._full(name))
        if self._adapters is not None:
            self._adapters.note_skip(self._full(name))

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        """Split the checkpoint's stacked linear `name` into several: {name: rows of all ranks}."""
        full = {self._full(part): rows for part, rows in parts.items()}
        self._source.split(self._full(name), full)
        if self._adapters is not None:
            self._adapters.note_split(self._full(name), full)

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        full = [self._full(part) for part in parts]
        self._source.split_experts(self._full(name), full, transposed=transposed)

    def skip_experts(self, name: str, held: Sequence[int]) -> None:
        self._source.skip_experts(self._full(name), held)
        if self._adapters is not None:
            self._adapters.note_held(self._full(name), held)

    def note_experts(
        self, name: str, mixture: Mixture, routers: Sequence[PackedLinear], *, turned: bool
    ) -> None:
        """Keep a layer's experts, and report them and their routers to the adapters. The linears of experts
        were requested below `name`. `turned`: adapters of stacked experts have inputs and outputs swapped.
        """
        self.mixtures.append(mixture)
        if self._adapters is not None:
            self._adapters.note_experts(self._full(name), mixture, routers, turned=turned)

    def embedding(self, name: str, vocab: ShardSlice, hidden: int, *, tied: bool) -> PackedLinear:
        outputs = {self._full(name): vocab}
        return self._packed(WeightRequest("tied" if tied else "table", outputs, ShardSlice.whole(hidden)))

    def head(self, name: str, vocab: ShardSlice, hidden: int, *, bias: bool = False) -> PackedLinear:
        outputs, inputs = {self._full(name): vocab}, ShardSlice.whole(hidden)
        return self._packed(WeightRequest("head", outputs, inputs, bias))

    def router(
        self, name: str, experts: ShardSlice, hidden: ShardSlice, *, bias: bool = False
    ) -> PackedLinear:
        return self._packed(WeightRequest("router", {self._full(name): experts}, hidden, bias))

    def wide_linear(
        self, name: str, outputs: ShardSlice, inputs: ShardSlice, *, transposed: bool = False
    ) -> PackedLinear:
        """Request a linear of one head for `Ops.linear_by_head`. `transposed`: as in `WeightRequest`."""
        rows = {self._full(name): outputs}
        return self._packed(WeightRequest("router", rows, inputs, transposed=transposed, is_by_head=True))

    def linear(
        self,
        outputs: Mapping[str, ShardSlice],
        inputs: ShardSlice,
        *,
        bias: bool,
        experts: bool = False,
        on_host: bool = False,
        order: tuple[int, ...] | None = None,
        transposed: bool = False,
    ) -> PackedLinear:
        """Request one linear that stacks the named ones: {name: rows}.

        `experts`: pack for `Ops.pack_experts`. `on_host`, `order`, `transposed`: as in `WeightRequest`. The
        results of a row-parallel linear are all-reduced, so only the rank with the first inputs has the bias.
        """
        full = {self._full(name): rows for name, rows in outputs.items()}
        if bias and inputs.start > 0:
            bias = False
            for name in full:
                self._source.skip(f"{name}.bias")
        kind: Kind = "experts" if experts else "linear"
        asked = WeightRequest(kind, full, inputs, bias, order, transposed, on_host)
        if self._mixed_layers and is_fine(asked.name, self._mixed_layers):
            asked = replace(asked, kind="head")
        return self._packed(asked)

    def _packed(self, asked: WeightRequest) -> PackedLinear:
        packed = self._source.packed(asked)
        if self._adapters is not None:
            self._adapters.note(asked, packed)
        return packed

    def _full(self, name: str) -> str:
        if name in self._names:
            name = self._names[name]
        elif self._names:
            name = ".".join(self._names.get(part, part) for part in name.split("."))
        return self._prefix + name


class WeightObserver(Protocol):
    """Observer of every weight that a source has loaded."""

    def vector(self, name: str, vector: Tensor) -> None: ...
    def packed(self, asked: WeightRequest, packed: PackedLinear, bias_O: Tensor | None) -> None: ...


class PackingSource(ABC):
    """Base of each `WeightSource` that reads tensors from files and packs them."""

    def __init__(
        self,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        keeper: WeightObserver | None,
        rank: TensorParallel,
    ) -> None:
        self.ops, self.rank, self.dtype, self.device = ops, rank, dtype, device
        self._keeper = keeper

    def packed(self, asked: WeightRequest) -> PackedLinear:
        """Read and pack a weight where its request says: on the device, or in main memory."""
        ops, device = self.ops, self.device
        if asked.on_host:
            assert ops.host_experts is not None
            self.ops, self.device = ops.host_experts, torch.device("cpu")
        try:
            packed, bias_O = self._packed(asked)
        finally:
            self.ops, self.device = ops, device
        if self._keeper is not None:
            self._keeper.packed(asked, packed, bias_O)
        return packed

    @abstractmethod
    def _packed(self, asked: WeightRequest) -> tuple[PackedLinear, Tensor | None]:
        """Read and pack a weight by `ops` and `device`. Returns its bias too, in the model's dtype."""

    def _kept(self, name: str, vector: Tensor) -> Tensor:
        """Show a vector to the observer, and return it."""
        if self._keeper is not None:
            self._keeper.vector(name, vector)
        return vector


def norm_weight(config: ModelConfig, weights: Weights, name: str, size: int) -> Tensor:
    """Read the weight [size] by which an RMSNorm multiplies.

    Gemma stores w and multiplies by 1 + w, which needs more bits than the dtype of w: the sum is kept in
    float32. Norms without weights multiply by 1.
    """
    if not config.has_norm_weights:
        return torch.ones(size, dtype=weights.dtype, device=weights.device)
    weight = weights.vector(f"{name}.weight", size)
    return 1 + weight.float() if config.norms_add_one else weight


def norm_bias(config: ModelConfig, weights: Weights, name: str, weight: Tensor) -> Tensor | None:
    """Read the bias of a LayerNorm, in the dtype of its weight; None: it has none."""
    if config.block not in BIASED_NORMS or not config.has_norm_weights:
        return None
    return weights.vector(f"{name}.bias", len(weight)).to(weight.dtype)
