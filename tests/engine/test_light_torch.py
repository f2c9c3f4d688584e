"""The engine's import of torch leaves things out; what was left out can still be had."""

import subprocess
import sys

import pytest


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


BEGIN = "import sys\nfrom llmbox.engine import light_torch\n"


def test_what_was_left_out_comes_when_it_is_asked_for() -> None:
    told = run(
        BEGIN + "light_torch.import_torch()\n"
        "assert 'torch' in sys.modules and 'torch._meta_registrations' not in sys.modules\n"
        "import torch\n"
        "x = torch.randn(5, 8)\n"
        "y = torch.nn.functional.linear(x, torch.randn(3, 8)).softmax(-1).sum()\n"
        "from torch._meta_registrations import meta_mm\n"
        "print(round(float(y)), torch.empty(2, 3, device='meta').mm(torch.empty(3, 4, device='meta')).shape)"
    )
    assert told == "5 torch.Size([2, 4])"


def test_numpy_is_left_out_without_a_word_and_can_still_be_imported() -> None:
    told = run(
        BEGIN + "import warnings\nwarnings.simplefilter('error')\nlight_torch.import_torch()\n"
        "import torch\n"
        "print('numpy' in sys.modules, torch.tensor([[1, 2], [3, 4]]).sum().item())\n"
        "import numpy\n"
        "print(numpy.arange(3).sum())"
    )
    assert told == "False 10\n3"


@pytest.mark.parametrize("before", ["import torch\n", "light_torch._NVIDIA = light_torch.Path('/')\n"])
def test_all_of_it_where_it_was_imported_before_or_a_gpu_is_there(before: str) -> None:
    told = run(
        BEGIN + before + "light_torch.import_torch()\nimport torch\n"
        "print(hasattr(sys.modules['torch._meta_registrations'], 'meta_mm'))"
    )
    assert told == "True"
