"""The engine runs with what the package declares: numpy is not among it, though tests install it."""

import subprocess
import sys

from support.tiny_models import make_tiny_model

SCRIPT = """
import sys
sys.modules["numpy"] = None
from llmbox.engine.config import EngineConfig
from llmbox.engine.executor.build import load_engine
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.sampling_params import SamplingParams

engine = load_engine(EngineConfig(model_path=sys.argv[1], name="m", threads=1), lambda _: None)
params = SamplingParams(max_tokens=4, temperature=0.8, top_k=5, top_p=0.9, logprobs=2, prompt_logprobs=1)
assert engine.add(AddRequest(request_id="a", prompt_ids=[5, 6, 7], params=params)) is None
tokens = []
while engine.has_work:
    for output in engine.step().outputs:
        tokens += output.token_ids
assert tokens
"""


def test_the_engine_runs_without_numpy(tmp_path):
    model = make_tiny_model(tmp_path / "m")
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, model], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


BARE = """
import sys
for name in ("msgspec", "setproctitle", "litestar", "sqlmodel", "pydantic"):
    sys.modules[name] = None
import llmbox.engine.core.engine, llmbox.engine.executor.build
import llmbox.engine.runner.cpu_runner, llmbox.kernels.dispatch
"""


def test_the_model_path_imports_nothing_of_the_server():
    """A machine with torch and the checkpoint libraries alone can run the engine."""
    done = subprocess.run([sys.executable, "-P", "-c", BARE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
