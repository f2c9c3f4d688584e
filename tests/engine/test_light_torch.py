"""The engine's import of torch leaves things out; what was left out can still be had."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmbox.engine import light_torch
from llmbox.engine.light_torch import WHOLE
from support.tiny_models import make_tiny_model

BEGIN = "import sys\nfrom llmbox.engine import light_torch\n"
LIGHT = BEGIN + "light_torch.import_torch()\nimport torch\n"


def run(code: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_what_was_left_out_comes_when_it_is_asked_for() -> None:
    told = run(
        LIGHT + "assert 'torch._meta_registrations' not in sys.modules\n"
        "x = torch.randn(5, 8)\n"
        "y = torch.nn.functional.linear(x, torch.randn(3, 8)).softmax(-1).sum()\n"
        "from torch._meta_registrations import meta_mm\n"
        "print(round(float(y)), torch.empty(2, 3, device='meta').mm(torch.empty(3, 4, device='meta')).shape)"
    )
    assert told == "5 torch.Size([2, 4])"


def test_by_attribute_too() -> None:
    """In one process: what is asked for first makes nothing of the rest."""
    asked_told = [
        ("torch.ones(2)", "tensor([1., 1.])"),  # modules in a circle make its text
        ("torch.vmap(torch.dot)(torch.ones(2, 3), torch.ones(2, 3)).tolist()", "[3.0, 3.0]"),
        ("torch.optim.SGD.__name__", "SGD"),
        ("torch.utils.data.Dataset.__name__", "Dataset"),
        ("torch.distributions.Normal(0., 1.).mean.item()", "0.0"),
        ("torch.func.grad(lambda x: x * x)(torch.tensor(3.)).item()", "6.0"),
        ("torch.fx.Graph and torch._subclasses.fake_impls.__name__", "torch._subclasses.fake_impls"),
        ("hasattr(torch, 'nothing') or hasattr(torch.utils, 'nothing')", "False"),
    ]  # fmt: skip
    code = LIGHT + "".join(f"print({asked})\n" for asked, _ in asked_told)
    assert run(code).splitlines() == [told for _, told in asked_told]


def test_a_worker_imports_no_more_than_its_engine() -> None:
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'torch._meta_registrations' in sys.modules))\n"
        "sys.argv[1:] = ['--help']\n"
        "runpy.run_module('llmbox.engine.process.worker_main', run_name='__main__')"
    )
    assert run(code).endswith("True False")


def test_an_engine_asks_for_nothing_that_was_left_out(tmp_path: Path) -> None:
    """Or its first token would wait for it."""
    code = LIGHT + (
        "from llmbox.engine.config import EngineConfig\n"
        "from llmbox.engine.executor.build import load_engine\n"
        "from llmbox.engine.ipc.messages import AddRequest\n"
        "from llmbox.engine.sampling_params import SamplingParams\n"
        "config = EngineConfig(model_path=sys.argv[1], name='m', context=128, kv_tokens=256)\n"
        "engine = load_engine(config, lambda _: None)\n"
        "for number, params in enumerate([SamplingParams(max_tokens=3, temperature=0.0),\n"
        "                                 SamplingParams(max_tokens=3, top_p=0.9, seed=7, logprobs=2)]):\n"
        "    engine.add(AddRequest(request_id=str(number), prompt_ids=[5, 6, 7], params=params))\n"
        "while engine.has_work:\n"
        "    engine.step()\n"
        "finder = next(f for f in sys.meta_path if type(f).__name__ == 'StubFinder')\n"
        "found = [m for m in sys.modules if finder.is_left_out(m) and m != light_torch.KEPT]\n"
        "print(found, 'numpy' in sys.modules)"
    )
    make_tiny_model(tmp_path)
    assert run(code, str(tmp_path)) == "[] False"


def test_numpy_is_left_out_without_a_word_and_can_still_be_imported() -> None:
    told = run(
        BEGIN + "import warnings\nwarnings.simplefilter('error')\nlight_torch.import_torch()\n"
        "import torch\n"
        "print('numpy' in sys.modules, torch.tensor([[1, 2], [3, 4]]).sum().item())\n"
        "print('numpy' in sys.modules)\n"
        "import numpy\n"
        "print(numpy.arange(3).sum())"
    )
    assert told == "False 10\nFalse\n3"


@pytest.mark.parametrize(
    "before",
    [
        "import torch\n",
        "light_torch.NVIDIA_FILES = (light_torch.Path('/none'), light_torch.Path('/'))\n",
        "light_torch.os.environ[light_torch.WHOLE] = '1'\n",
    ],
)
def test_all_of_it_where_it_was_imported_before_or_a_gpu_is_there_or_it_is_asked_for(before: str) -> None:
    told = run(
        BEGIN + before + "light_torch.import_torch()\nimport torch\n"
        "print(hasattr(sys.modules['torch._meta_registrations'], 'meta_mm'))"
    )
    assert told == "True"


def test_a_program_starts_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, workers and quantizations alike."""

    def fail() -> None:
        raise RuntimeError("I want torch.fx")

    started: list[list[str]] = []
    monkeypatch.setattr(light_torch, "import_torch", fail)
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    monkeypatch.setenv(WHOLE, "")
    monkeypatch.delenv(WHOLE)
    light_torch.import_torch_or_restart()
    assert started == [[sys.executable, *sys.orig_argv[1:]]]
    with pytest.raises(RuntimeError, match=r"torch\.fx"):
        light_torch.import_torch_or_restart()


def test_a_torch_that_needs_all_of_it_is_imported_in_a_second_try(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Picky:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'torch.nn' and '{WHOLE}' not in os.environ:\n"
        "            raise RuntimeError('I want torch.fx')\n"
        "sys.meta_path.insert(0, Picky())\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmbox.engine.process.engine_main",
             "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            text=True,
        )  # fmt: skip
        theirs.close()
        ours.shutdown(socket.SHUT_WR)  # it ends once it listens
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert said.count("I want torch.fx") == 1
