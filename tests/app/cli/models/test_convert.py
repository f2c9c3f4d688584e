"""What `quantize` and `import` say while their process works."""

import pytest

from llmbox.app.cli.models.convert import run_job
from llmbox.app.lifecycle.program import Program

JOB = """
import json
for message in ({"compiling": [1, 3]}, {"report": {"done": True}}):
    print(json.dumps(message), flush=True)
"""


@pytest.mark.process
def test_a_compile_of_the_kernels_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "some_job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = Program(data_dir=tmp_path / "data")
    words = lambda what, _done, _total: what  # noqa: E731
    assert run_job(program, "some_job", [], failed="not done", words=words) == {"done": True}
    assert capsys.readouterr().err == "compiling the CPU kernels (once): 1 of 3 steps\n"
