import pytest
import torch

from llmbox.kernels.dispatch import BACKENDS
from llmbox.kernels.ops import Ops


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(params=list(BACKENDS))
def ops(request: pytest.FixtureRequest) -> Ops:
    return BACKENDS[request.param]
