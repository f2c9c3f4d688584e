"""Fast import of torch for engines on a CPU.

Half of the time that `import torch` takes goes into modules for tracing, compiling and training. The engine
uses none of them, so they are stubbed (`StubFinder`) and loaded only if something imports them later.
Measured: `import torch` takes 1.65 s of CPU time and 225 MB, `import_torch` 0.75 s and 177 MB.

numpy is hidden as well: it is no dependency of llmbox, torch imports it where it is installed, and without it
torch lacks only `Tensor.numpy()`.
"""

import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self, cast

from .hardware.proc import NVIDIA_FILES

log = logging.getLogger(__name__)


class StubFinder:
    """Meta-path finder, and the context manager during which the listed modules are stubs."""

    def __init__(self, names: Collection[str], kept: str, in_order: Sequence[str]) -> None:
        """`names`: modules to stub, with all their submodules except `kept`. `in_order`: modules to import
        first when the real ones are loaded later.
        """
        self.names = names
        self.over = False
        self._kept = kept
        self._in_order = in_order

    def __enter__(self) -> Self:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *_error: object) -> None:
        """Remove the stubs; from now on an import of one of the modules loads the real one."""
        self.over = True
        for name in [name for name, module in sys.modules.items() if isinstance(module, StubModule)]:
            place, _, child = name.rpartition(".")
            parent = sys.modules.get(place)  # gone where the import failed
            if parent is not None and isinstance(vars(parent).get(child), StubModule):
                delattr(parent, child)
                offer(parent, self.names)
            del sys.modules[name]

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: object = None) -> ModuleSpec | None:
        if name == self._kept or not self.is_left_out(name):
            return None
        if not self.over:
            return ModuleSpec(name, cast("Any", self), is_package=True)
        sys.meta_path.remove(self)
        for first in self._in_order:
            import_module(first)
        if self._kept in sys.modules:
            parent, _, child = self._kept.rpartition(".")
            setattr(import_module(parent), child, sys.modules[self._kept])
        return LoadedModuleLoader.spec(sys.modules[name]) if name in sys.modules else None

    def is_left_out(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:count]) in self.names for count in range(1, len(parts) + 1))

    def create_module(self, spec: ModuleSpec) -> "StubModule":
        return StubModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the stub empty, but set `__path__` so that the `kept` module below it is found."""
        parent, _, child = module.__name__.rpartition(".")
        module.__path__ = [f"{place}/{child}" for place in sys.modules[parent].__path__]


class LoadedModuleLoader:
    """Loader of a module that was imported during its own lookup: it prevents a second execution."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    @classmethod
    def spec(cls, module: ModuleType) -> ModuleSpec:
        """Return a spec and set it on the module: the import system reads `__spec__` of a loaded module."""
        module.__spec__ = ModuleSpec(module.__name__, cast("Any", cls(module)))
        return module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class StubModule(ModuleType):
    """Stub module: every attribute is a `DeferredAttribute`."""

    def __init__(self, name: str, left_out: StubFinder) -> None:
        super().__init__(name)
        self._left_out = left_out

    def __getattr__(self, name: str) -> "DeferredAttribute":
        if name.startswith("__"):
            raise AttributeError(name)
        return DeferredAttribute(self.__name__, name, self._left_out)


class DeferredAttribute:
    """Proxy of an attribute that was imported from a stub: it loads the real one on use."""

    def __init__(self, module: str, name: str, left_out: StubFinder) -> None:
        self._place = module, name
        self._left_out = left_out

    def _real(self) -> Any:
        module, name = self._place
        return getattr(import_module(module), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the real object; do nothing during the stubbed import, which calls only set-up functions."""
        return self._real()(*args, **kwargs) if self._left_out.over else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self._left_out.over:
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._real())

    def __or__(self, other: object) -> "DeferredAttribute":
        """Support `X | None` in annotations."""
        return self

    __ror__ = __or__


class ChildImporter:
    """Module `__getattr__` that imports those of `names` that are children of `parent` on first access."""

    def __init__(self, parent: str, names: Collection[str], before: Callable[[str], Any] | None) -> None:
        self._parent, self._names, self._before = parent, names, before

    def __call__(self, name: str) -> Any:
        if f"{self._parent}.{name}" in self._names:
            return import_module(f"{self._parent}.{name}")
        if self._before is not None:
            return self._before(name)
        raise AttributeError(f"module {self._parent!r} has no attribute {name!r}")


def offer(parent: ModuleType, names: Collection[str]) -> None:
    before = vars(parent).get("__getattr__")
    if not isinstance(before, ChildImporter):
        vars(parent)["__getattr__"] = ChildImporter(parent.__name__, names, before)


LEFT_OUT: Final = frozenset(
    {
        "torch._functorch",
        "torch._higher_order_ops",
        "torch._logging",
        "torch._meta_registrations",
        "torch._native",  # kernels for GPUs
        "torch._subclasses",
        "torch.ao",
        "torch.distributions",
        "torch.export",
        "torch.func",
        "torch.fx",
        "torch.hub",
        "torch.masked",
        "torch.nested",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.optim",
        "torch.profiler",
        "torch.quantization",
        "torch.utils.data",
    }
)
KEPT: Final = "torch.fx.experimental.sym_node"
"""Module that stays real: operators look it up when they get a Python number."""
IN_ORDER: Final = ("torch._functorch.predispatch", "torch.export", "torch._meta_registrations")
"""Modules to load first: some of the stubbed modules import each other in cycles, and a full `import torch`
enters the cycles here."""
WHOLE: Final = "LLMBOX_WHOLE_TORCH"
"""Environment variable that forces the full import; set after the fast import failed."""
_NUMPY: Final = "numpy"


def import_torch() -> None:
    """Import torch, once, before any other import of it. With a GPU it is imported in full: Triton and
    torch's compilers trace.

    After any exception torch is not imported and cannot be imported in this process.
    """
    if "torch" in sys.modules or any(map(Path.exists, NVIDIA_FILES)) or WHOLE in os.environ:
        return
    collects = gc.isenabled()
    gc.disable()  # fifty thousand objects are made, and all of them stay
    hides_numpy = sys.modules.setdefault(_NUMPY, None) is None  # type: ignore[arg-type]  # says: not there
    try:
        with StubFinder(LEFT_OUT, KEPT, IN_ORDER), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Failed to initialize NumPy")
            import torch  # noqa: PLC0415

            torch.tensor(())  # looks for numpy, once for all
    finally:
        if hides_numpy:
            del sys.modules[_NUMPY]
        if collects:
            gc.enable()


def import_torch_or_restart() -> None:
    """Import torch; where the light import fails, start this program again with all of torch."""
    try:
        import_torch()
    except Exception as error:
        if WHOLE in os.environ:
            raise
        log.warning("torch cannot be imported in part, all of it is imported instead: %r", error)
        os.environ[WHOLE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this program once more
