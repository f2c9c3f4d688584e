"""Code that may not look at what is on a device: on a CPU a look costs nothing and would go unnoticed."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")

OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
"""Of ATen, whoever calls them: results that the host must see, or whose size follows from numbers."""
READINGS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Of tensors: of those that lie on a CPU already ATen does not hear."""


class NoQuestions:
    def __init__(self) -> None:
        self._refuses = True

    def during(self, work: Callable[..., T]) -> Callable[..., T]:
        """That, which then fails where it asks."""

        def blind(*args: Any) -> T:
            with _Operations(self.check), _Readings(self.check):
                return work(*args)

        return blind

    def but_for(self, work: Callable[..., T]) -> Callable[..., T]:
        """That, which may ask."""

        def asking(*args: Any) -> T:
            self._refuses = False
            try:
                return work(*args)
            finally:
                self._refuses = True

        return asking

    def check(self, name: str, refused: tuple[str, ...]) -> None:
        assert not self._refuses or name not in refused, f"{name} waits for the device"


class _Operations(TorchDispatchMode):
    def __init__(self, check: Callable[[str, tuple[str, ...]], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check(func.__name__.split(".")[0], OPERATIONS)
        return func(*args, **(kwargs or {}))


class _Readings(TorchFunctionMode):
    def __init__(self, check: Callable[[str, tuple[str, ...]], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check(getattr(func, "__name__", ""), READINGS)
        return func(*args, **(kwargs or {}))
