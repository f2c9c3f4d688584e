import pytest
import torch

from llmbox.kernels.dispatch import TORCH_BACKENDS, load_backend
from llmbox.kernels.ops import Ops
from support.kernel_backends import backends


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # that of all devices takes ten times as long


BEST = next((name for name in backends() if name.startswith("cpu ")), None)
TWINS = {"cpu avx512-vnni", "cpu avx512"} - {BEST}
"""Levels with the registers and loops of a better one that is here too: compiled and tested each night."""


WITH_LINEARS = ("test_linear", "test_moe", "test_lora")
"""Files with what `onednn` computes; elsewhere its operations are the functions of `reference`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The C++ kernels do not compute in float16: those combinations are no tests."""
    kept, left_out = [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if any(isinstance(value, str) and value in TWINS for value in params.values()):
            item.add_marker("nightly")
        native = params.get("ops", "reference") not in TORCH_BACKENDS
        if params.get("ops") == "onednn" and item.path.stem not in WITH_LINEARS:
            left_out.append(item)
            continue
        (left_out if native and params.get("dtype") == torch.float16 else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(params=backends())
def ops(request: pytest.FixtureRequest) -> Ops:
    """Every backend this machine can run; the C++ ones on three threads, whatever the cores."""
    if request.param in TORCH_BACKENDS:
        return TORCH_BACKENDS[request.param]
    backend = load_backend(request.param)
    backend.use_threads([0, 1, 0])
    return backend.ops()
