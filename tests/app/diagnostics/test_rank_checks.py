"""How a model is cut, and why, where people look; and what cannot be, in words that help."""

import pytest

from llmbox.app.cli.models.models import _print_info
from llmbox.app.diagnostics import checks
from llmbox.app.diagnostics.checks import Finding
from llmbox.app.errors import Exit
from llmbox.app.lifecycle.program import Program
from llmbox.app.util.formatting import runs_on
from llmbox.engine.hardware.gpus import Gpu
from llmbox.engine.hardware.machine import Cpu, Machine, Memory
from support.cli_call import Call, FakeClient, call, home

__all__ = ["call", "home"]

INFO = {"device": "cuda", "dtype": "bfloat16", "quant": "none", "tp": 2, "pp": 2, "notes": ["as asked"]}


def box_with(gpus, *nvlink):
    cards = tuple(Gpu(index, "A card", f"GPU-{index}", 80 * 10**9, 79 * 10**9, None) for index in range(gpus))
    memory = Memory(64 * 10**9, 60 * 10**9, limited_by_cgroup=False)
    return Machine(Cpu("A processor", 8, 16, ("avx2",)), memory, cards, None, tuple(map(frozenset, nvlink)))


@pytest.mark.parametrize(
    ("gpus", "nvlink", "words"),
    [
        (4, [(0, 1, 2, 3)], "NVLink peers are GPUs 0, 1, 2 and 3: a model that needs several is shared"),
        (5, [(0, 1), (3, 4)], "NVLink peers are GPUs 0 and 1 and of 3 and 4: "),
        (2, [], "2 GPUs without NVLink: a model that needs several is cut into stages (--pp)"),
    ],
)
def test_doctor_tells_what_joins_the_gpus(monkeypatch, gpus, nvlink, words):
    monkeypatch.setattr(checks, "read_machine", lambda: box_with(gpus, *nvlink))
    (found,) = (each for each in checks.check_machine(Program({})) if each.name == "links")
    assert words in found.message


def test_doctor_says_nothing_of_links_of_one_gpu(monkeypatch):
    monkeypatch.setattr(checks, "read_machine", lambda: box_with(1))
    assert "links" not in {each.name for each in checks.check_machine(Program({}))}


def test_doctor_tells_what_loaded_models_run_on_and_why():
    program = Program({})
    models = [{"name": "org/big", "info": INFO}, {"name": "on its way", "info": None}]
    program.client = FakeClient({"/admin/api/models": {"models": models}})
    told = "cuda bfloat16 on 4 ranks (tp 2, pp 2); as asked"
    assert list(checks._in_memory(program)) == [Finding("loaded org/big", "ok", told)]
    models[0]["info"] = {**INFO, "kernels_problem": "no room"}
    (found,) = checks._in_memory(program)
    assert (found.status, found.message) == ("note", told)
    assert "llmbox unload org/big" in found.fix


def test_show_tells_it_too(capsys):
    sizes = dict.fromkeys(("weights_bytes", "kv_bytes", "workspace_bytes", "kv_bytes_per_token"), 1000)
    info = {
        **INFO,
        **sizes,
        "generates": True,
        "backend": "triton",
        "context_window": 4096,
        "max_concurrency": 2.0,
    }
    _print_info({"info": info, "restarts": 0, "resumed": 0})
    shown = capsys.readouterr().out
    assert "cuda bfloat16 on 4 ranks (tp 2, pp 2), kernels: triton" in shown
    assert "notes            as asked" in shown
    _print_info({"info": {**info, "notes": []}, "restarts": 0, "resumed": 0})
    assert "notes" not in capsys.readouterr().out


def test_whole_experts_are_told():
    assert runs_on({**INFO, "expert_parallel": True}).endswith("on 4 ranks (tp 2, pp 2, experts whole)")
    beside = {**INFO, "tp": 1, "pp": 1, "expert_bytes": 1, "expert_quant": "int8"}
    assert runs_on(beside).endswith(", experts on cpu int8")
    copied = {**INFO, "expert_parallel": True, "redundant_experts": 3}
    assert runs_on(copied).endswith("on 4 ranks (tp 2, pp 2, experts whole + 3 copies)")


def test_one_rank_needs_no_words():
    assert runs_on({**INFO, "quant": "int8", "tp": 1, "pp": 1}) == "cuda int8"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tp", 3), "attention heads cannot be shared equally; this model can take 1"),
        (("--pp", 16), "ask for at most that many stages"),
        (("--tp", 8, "--pp", 4), "make 32 ranks: at most 16 can run"),
        (("--tp", 2), "every layer shared by 2 ranks, as asked"),
    ],
)
def test_fit_tells_how_a_model_would_be_cut_or_why_it_cannot_be(call: Call, flags, words):
    done = call("fit", "builtin", *flags)
    assert words in done.out + done.err
    assert done.code == (Exit.OK if "as asked" in words else Exit.DOES_NOT_FIT)


@pytest.mark.parametrize("value", ["0", "17", "two"])
def test_numbers_that_cannot_be_are_refused_by_name(call: Call, value):
    flag, setting = call("fit", "builtin", "--tp", value), call("config", "set", "model.pp", value)
    assert (flag.code, setting.code) == (Exit.USAGE, Exit.USAGE)
    assert "tp" in flag.err
    assert "model.pp" in setting.err
