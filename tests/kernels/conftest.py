import pytest
import torch

from llmbox.kernels.cpu.load import load_backend
from llmbox.kernels.dispatch import TORCH_BACKENDS, backends
from llmbox.kernels.ops import Ops


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(params=backends())
def ops(request: pytest.FixtureRequest) -> Ops:
    """Every backend this machine can run; the C++ ones on three threads, whatever the cores."""
    if request.param in TORCH_BACKENDS:
        return TORCH_BACKENDS[request.param]
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype") == torch.float16:
        pytest.skip("float16 runs on PyTorch's kernels")
    backend = load_backend(request.param)
    backend.use_threads([0, 1, 0])
    return backend.ops()
