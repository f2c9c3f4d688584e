import pytest
import torch

from llmbox.kernels.dispatch import UnknownBackend, select_ops
from support.kernel_backends import backends

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", backends())
def test_the_environment_can_force_a_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", name)
    assert select_ops(CPU, torch.float32).name.split(" (")[0] == name


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "cuda13")
    with pytest.raises(UnknownBackend, match=r"'cuda13'; llmbox doctor says which there are"):
        select_ops(CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_has_a_backend(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.delenv("LLMBOX_KERNELS", raising=False)
    assert select_ops(CPU, dtype).name.split(" (")[0] in backends()
