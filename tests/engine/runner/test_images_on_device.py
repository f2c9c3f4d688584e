"""Pictures on the runner for devices: the tokens of the runner for CPUs, and no wait of the host."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from engine.vision.test_seeing_models import IMAGE, seeing
from engine.vision.test_seeing_ranks import asked
from llmbox.engine.ipc.messages import AddRequest
from support.device_ranks import device_ranks
from support.fake_cuda import Card, fake_cuda
from support.late_device import FakeCapture, LateDevice, device_engine
from support.no_questions import NoQuestions
from support.real_engines import load, run, tokens
from support.triton_interpreter import turn_on
from support.vision_models import MODELS, make_vision_model

turn_on()

OPTIONS: dict[str, Any] = {"dtype": "float32", "context": 512, "max_running": 4, "token_budget": 24}
SMALL = {
    kind: MODELS[kind][1]["text_config"] | {"num_hidden_layers": layers, "intermediate_size": 32}
    for kind, layers in (("qwen3_vl", 2), ("gemma3", 1))
}
GEMMA4 = {"text_config": MODELS["gemma4"][1]["text_config"] | {"use_bidirectional_attention": "vision"}}


def ends_with_a_picture(directory: Path) -> AddRequest:
    """The last token of its prompt, which a step may compute beside decoding rows, is a picture's."""
    request = seeing(directory, "last", (30, 100))
    image = request.images[0]
    return AddRequest(
        request_id="last",
        prompt_ids=request.prompt_ids[: image.start + image.num_tokens],
        images=[image],
        params=request.params,
    )


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "gemma4", "mistral3", "qwen3_5"])
def test_tokens_are_those_of_the_runner_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    make_vision_model(tmp_path, kind, **(GEMMA4 if kind == "gemma4" else {}))
    requests = [*asked(tmp_path), ends_with_a_picture(tmp_path)]
    capture = FakeCapture()
    device, questions = LateDevice(), NoQuestions()
    engine = device_engine(tmp_path, device, capture, **OPTIONS)
    while engine.prepare():
        pass
    runner: Any = engine.executor
    runner._forward = questions.but_for(runner._forward)  # the reference's attention looks
    runner._model.hidden = questions.but_for(runner._model.hidden)
    runner.launch_sized = questions.during(runner.launch_sized)
    assert tokens(engine, requests) == tokens(load(tmp_path, **OPTIONS), requests)
    assert capture.replays > 0
    assert device.waits == engine.stats().steps


def test_a_prompt_cut_before_the_last_row_of_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    make_vision_model(tmp_path, "qwen3_vl")
    request = ends_with_a_picture(tmp_path)
    assert request.prompt_ids[-1] == IMAGE
    options = OPTIONS | {"max_running": 1, "prefix_cache": False}
    expected = tokens(load(tmp_path, **options), [request])
    options["token_budget"] = len(request.prompt_ids) - 1
    assert tokens(device_engine(tmp_path, **options), [request]) == expected


@pytest.mark.parametrize(("kind", "cut"), [("qwen3_vl", {"tp": 2}), ("gemma3", {"pp": 2})])
def test_ranks_give_the_tokens_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, cut: dict[str, int]
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    make_vision_model(tmp_path, kind)
    expected = tokens(load(tmp_path, **OPTIONS), asked(tmp_path))
    with device_ranks(tmp_path, **cut, **OPTIONS) as (engine, _):
        assert tokens(engine, asked(tmp_path)) == expected


@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_triton_kernels_give_the_tokens_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tower, projector and language model; decoding by graphs, with positions that pictures shift."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    make_vision_model(tmp_path, "qwen3_vl", text_config=SMALL["qwen3_vl"])
    requests = [seeing(tmp_path, "a"), seeing(tmp_path, "b", (30, 20))]
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = tokens(load(tmp_path, **OPTIONS), requests)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    capture = FakeCapture()
    engine = device_engine(tmp_path, capture=capture, **OPTIONS)
    engine.prepare()
    assert tokens(engine, requests) == expected
    assert capture.replays > 0


@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_a_model_is_loaded_measured_and_served_over_a_stand_in_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of its pictures see each other. No step waits for the device."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    make_vision_model(tmp_path, "gemma3", text_config=SMALL["gemma3"])
    requests = [seeing(tmp_path, "a"), seeing(tmp_path, "b", (30, 20))]
    sizes = OPTIONS | {"max_running": 2, "speculate": "off", "context": 48, "cuda_graphs": False}
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = tokens(load(tmp_path, **sizes), requests)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(tmp_path, device="cuda", memory_bytes=None, **sizes)
        assert (engine.info.backend, engine.info.image_problem) == ("triton", "")
        kept = engine.info.image_cache_bytes
        (measured,) = re.findall(r"images ([\d.]+) MB", caplog.text)
        assert float(measured) * 1e6 > kept > 0
        waited, events = len(cuda.queue.waits), cuda.queue.event_waits
        seen = run(engine, requests)
        assert cuda.queue.waits[waited:] == []
        assert cuda.queue.event_waits - events == engine.stats().steps
    assert {
        name: [t for each in outputs for t in each.token_ids] for name, outputs in seen.items()
    } == expected
