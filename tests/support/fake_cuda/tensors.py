"""Tensors that say they are on a GPU, over tensors of the CPU; and what operations do with them."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .card import Card
from .queue import Arrival, Departure, LateArrival, Queue, Untouched
from .scaled_mm import scaled_mm

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
ATEN = torch.ops.aten
ASKS = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "equal", "is_nonzero", "item",
    "bincount", "unique_consecutive", "unique_dim",
}  # fmt: skip
"""Results that the host must see, or whose size follows from numbers."""
COPIES = {ATEN.copy_.default, ATEN._to_copy.default, ATEN.to.dtype_layout, ATEN.to.device, ATEN.to.dtype}
EMPTY = {ATEN.empty, ATEN.empty_like, ATEN.new_empty}
MIXES = {"index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index"}
"""Indices may lie on the CPU: they are copied, and that waits."""


class GpuTensor(Tensor):
    """`elem`: the same numbers, on the CPU."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> Self:
        made = Tensor._make_subclass(
            cls, elem, elem.requires_grad, dispatch_device=True, device_for_backend_keys=GPU
        )
        made.elem = elem
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({tuple(self.elem.shape)}, {self.elem.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        """In C++ it looks at devices first, of which a PyTorch without CUDA knows none."""
        return Operations.current.run(ATEN.copy_.default, (self, source, non_blocking), {})

    def __getitem__(self, key: Any) -> Tensor:
        """In C++ too."""
        return Operations.current.item(self, key)

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> Tensor:
        return self if self.elem.is_contiguous() else self.clone(memory_format=memory_format)

    def __invert__(self) -> Tensor:
        return self.bitwise_not()

    def __setitem__(self, key: Any, value: Any) -> None:
        Operations.current.set_item(self, key, value)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Operations.current.run(func, args, kwargs or {})


class Operations(TorchDispatchMode):
    current: "Operations"
    gpu = GPU

    def __init__(self, card: Card, queue: Queue, *, blank: bool = False) -> None:
        """`blank`: new memory is zeros, as no kernel writes to it."""
        super().__init__()
        self.card, self.queue = card, queue
        self._blank = blank
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()

    def __enter__(self) -> Self:
        Operations.current = self
        return super().__enter__()

    def hear(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes():
            return self._run(func, args, dict(kwargs))

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:
            return GPU
        seen = flat_tensors((args, kwargs))
        on_gpu = [each for each in seen if isinstance(each, GpuTensor)]
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted)
        pins = kwargs.pop("pin_memory", None) or False
        if not on_gpu and (wanted is None or wanted.type != "cuda"):
            result = func(*args, **kwargs)
            return self.pin(result) if pins else result
        if func in COPIES:
            return self._copied(func, args, kwargs, wanted)
        self._check(func, seen, on_gpu)
        if wanted is not None:
            assert wanted.type == "cuda" or func.overloadpacket in {ATEN.empty, ATEN.new_empty}, func
            kwargs["device"] = CPU
        return self._computed(func, args, kwargs, stays=wanted is None or wanted.type == "cuda")

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any], *, stays: bool) -> Any:
        if func.overloadpacket is ATEN._fused_sdp_choice:
            return 0  # the way without kernels of its own
        if func.overloadpacket is ATEN._scaled_mm:
            func = _ScaledMM
        plain_args, plain_kwargs = tree_map(bare, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if self._blank and func.overloadpacket in EMPTY:
            result.view(torch.uint8).zero_()
        mutated = {
            id(bare(each)): each for each in flat_tensors((args, kwargs)) if isinstance(each, GpuTensor)
        }
        self._note(func, plain_args, plain_kwargs, result)

        def wrap(each: Any) -> Any:
            if not isinstance(each, Tensor) or not stays:
                return each
            return mutated[id(each)] if id(each) in mutated else self.on_gpu(each)

        return tree_map(wrap, result)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        old = {each.untyped_storage()._cdata for each in flat_tensors((args, kwargs))}
        results = [each for each in flat_tensors(result) if each.untyped_storage()._cdata not in old]
        if not func._schema.is_mutable and not results:
            return  # a view
        if self.queue.recording is None:
            self.queue.launches += 1
            return

        def again() -> None:
            found = flat_tensors(func(*args, **kwargs))
            made = [each for each in found if each.untyped_storage()._cdata not in old]
            for place, new in zip(results, made, strict=True):
                place.copy_(new)

        self.queue.launch(again, results)

    def on_gpu(self, elem: Tensor) -> GpuTensor:
        self.card.hold(elem)
        return GpuTensor(elem)

    def item(self, tensor: GpuTensor, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(each, Tensor | list) for each in keys):
            with _disable_current_modes():
                return self.on_gpu(tensor.elem[key])
        return self.run(_Indexed(), (tensor, *keys), {})

    def set_item(self, tensor: GpuTensor, key: Any, value: Any) -> None:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, Tensor | list) for each in keys):
            self.run(_Indexed(value), (tensor, *keys), {})
        elif isinstance(value, Tensor):
            self.item(tensor, key).copy_(value)
        else:
            self.item(tensor, key).fill_(value)

    def pinned_copy(self, tensor: Tensor) -> Tensor:
        """`Tensor.pin_memory`."""
        assert not isinstance(tensor, GpuTensor), "only dense CPU tensors can be pinned"
        return self.pin(tensor.clone())

    def pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def _check(self, func: Any, seen: list[Tensor], on_gpu: list[GpuTensor]) -> None:
        name = func.overloadpacket.__name__
        if name in ASKS:
            self.queue.wait(name)
        if name == "repeat_interleave" and "output_size" not in str(func._schema):
            self.queue.wait(name)
        strangers = [each for each in seen if not isinstance(each, GpuTensor) and each.dim()]
        if strangers and name in MIXES and isinstance(seen[0], GpuTensor):
            self.queue.wait(f"{name} by indices of the CPU")
        elif strangers and on_gpu:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices: {name} of "
                f"{[(tuple(each.shape), isinstance(each, GpuTensor)) for each in seen]}"
            )

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any], wanted: torch.device | None) -> Any:
        if func is ATEN.copy_.default:
            return self._copy_into(func, *args, **kwargs)
        if wanted is None:
            wanted = next((each for each in args if isinstance(each, torch.device)), None)
        source = args[0]
        from_gpu = isinstance(source, GpuTensor)
        to_gpu = from_gpu if wanted is None else wanted.type == "cuda"
        args = tree_map(lambda each: CPU if isinstance(each, torch.device) else each, args)
        if wanted is not None and "device" in kwargs:
            kwargs["device"] = CPU
        if from_gpu and to_gpu:
            return self._computed(func, args, kwargs, stays=True)
        result = func(*tree_map(bare, args), **kwargs)
        if result is bare(source):
            result = result.clone()
        if from_gpu:
            self.queue.wait("a copy to the host")
            return result
        if not to_gpu:
            return result
        self._to_device(source, kwargs.get("non_blocking", False))
        return self.on_gpu(result)

    def _copy_into(self, func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
            self._computed(func, (target, source), {}, stays=True)
        elif isinstance(target, GpuTensor):
            if self.queue.is_beside and non_blocking and source.untyped_storage() in self._pinned:
                self.queue.launches += 1
                self.queue.under_way.append(Departure(source, target.elem))
                return target
            target.elem.copy_(source)
            self._to_device(source, non_blocking)
        elif non_blocking and target.untyped_storage() in self._pinned:
            self.queue.launches += 1
            source = bare(source)
            late = self.queue.is_beside
            self.queue.under_way.append(
                LateArrival(source, target) if late else Arrival(source.clone(), target)
            )
            target.fill_(torch.nan if target.is_floating_point() else -1)
        else:
            self.queue.wait("a copy to the host")
            target.copy_(bare(source))
        return target

    def _to_device(self, source: Tensor, non_blocking: bool) -> None:
        self.queue.launches += 1
        if non_blocking and source.untyped_storage() in self._pinned:
            source = source.contiguous() if not source.is_contiguous() else source
            self.queue.under_way.append(Untouched(source.reshape(-1), source.reshape(-1).clone()))
        else:
            self.queue.wait("a copy from memory that is not pinned, or not told to run beside")


class _Indexed:
    """As an operation: indices among the arguments, or what is written there."""

    def __init__(self, value: Any = None) -> None:
        self._value = value
        self.overloadpacket = ATEN.index
        self._schema = SimpleNamespace(is_mutable=value is not None)

    def __call__(self, tensor: Tensor, *keys: Any) -> Tensor:
        if self._value is None:
            return tensor[keys]
        tensor[keys] = bare(self._value)
        return tensor


class _ScaledMM:
    overloadpacket = ATEN._scaled_mm
    _schema = SimpleNamespace(is_mutable=False)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return scaled_mm(*args, **kwargs)


# Not in the class: its base would wrap the method, for which it imports all of torch's compiler.
Operations.__torch_dispatch__ = Operations.hear  # type: ignore[method-assign]


def bare(each: Any) -> Any:
    return each.elem if isinstance(each, GpuTensor) else each


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Quicker than torch's, as there are lists, tuples and dicts alone."""
    if isinstance(tree, tuple | list):
        changed = [tree_map(change, each) for each in tree]
        return changed if isinstance(tree, list) else tuple(changed)
    if isinstance(tree, dict):
        return {name: tree_map(change, each) for name, each in tree.items()}
    return change(tree)


def flat_tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [tensor for each in tree for tensor in flat_tensors(each)]
