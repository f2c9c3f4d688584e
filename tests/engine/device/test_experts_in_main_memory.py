"""A mixture with experts in main memory and all else on a GPU, from the loader on, over fake CUDA."""

from dataclasses import replace
from itertools import pairwise

import pytest

from llmbox.app.models.gguf_folders import folder_of
from llmbox.engine.checkpoint.adapter import AdapterError, read_adapter
from llmbox.engine.config import EngineConfig
from llmbox.engine.device.host_experts import HostExperts
from llmbox.engine.errors import DeviceError, DoesNotFit, ParallelError
from llmbox.engine.executor.build import load_engine
from llmbox.kernels.dispatch import select_host
from support.adapters import make_adapter
from support.fake_cuda import Card, fake_cuda
from support.fake_cuda.tensors import Operations
from support.families import make_family
from support.gguf_models import write_gguf
from support.lanes import nightly
from support.real_engines import ask, hf_model, load, run, runner_of, tokens
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in")  # numpy's, of rows that only fill up
SIZES = {
    "dtype": "float32",
    "max_running": 2,
    "token_budget": 16,
    "context": 40,
    "speculate": "off",
    "memory_bytes": None,
    "kv_host_bytes": 0,
}
ON_GPU = {"device": "cuda", "cpu_experts": "on", **SIZES}
REQUESTS = [ask("a", range(5, 16), 3, logprobs=2), ask("b", [7, 8, 9], 3, logprobs=2)]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")


@pytest.fixture
def mixture(tmp_path):
    sizes = {"num_hidden_layers": 1, "vocab_size": 99, "moe_intermediate_size": 64}
    return make_tiny_model(tmp_path / "mixture", arch="qwen3_moe", **sizes)


def on_cpu(monkeypatch, folder, **options):
    with monkeypatch.context() as kernels:
        kernels.delenv("LLMBOX_KERNELS")
        return load(folder, **{**SIZES, **options})


def noted(method, calls):
    """Call it, with a note of what the device was given before."""

    def call(self, *inputs, **more):
        calls.append((method.__name__, Operations.current.queue.launches))
        return method(self, *inputs, **more)

    return call


def chances(outputs):
    return [each.logprob for output in outputs for each in output.logprobs]


def packed_bytes(engine, form):
    """Of all experts, as the C++ kernels keep them."""
    runner = runner_of(engine)
    found = runner._model.mixtures
    packing = select_host(1, form).packing
    linears = [linear for mixture in found for linear in (*mixture.gate_ups, *mixture.downs)]
    return [(packing.format_name(each), bytes(packing.panels(each))) for each in linears]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["qwen3_moe", "glm4_moe", nightly("qwen2_moe")])
def test_tokens_are_those_of_a_cpu_and_do_not_depend_on_the_batch(tmp_path, monkeypatch, arch):
    """Also with a shared expert, with a gate of its own, and with a correction of the router's scores."""
    make = make_tiny_model if arch == "qwen3_moe" else make_family
    folder = make(tmp_path, arch=arch, num_hidden_layers=2)
    expected = tokens(on_cpu(monkeypatch, folder), REQUESTS)
    calls = []
    for name in ("send", "experts"):
        method = getattr(HostExperts, name)
        monkeypatch.setattr(HostExperts, name, noted(method, calls))
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        engine = load(folder, deterministic=True, **ON_GPU)
        info = engine.info
        assert (info.device, info.expert_quant) == ("cuda", "none")
        assert info.backend.startswith("triton; experts: cpu ")
        assert info.host_bytes == info.expert_bytes > 0
        assert (cuda.card.graphs, engine.prepare()) == (0, False), "a graph would hold no step of the host"
        waits = len(cuda.queue.waits)
        calls.clear()
        together = run(engine, REQUESTS)
        assert cuda.queue.waits[waits:] == []
        pairs = list(pairwise(calls))[::2]
        assert {(before, after) for (before, _), (after, _) in pairs} == {("send", "experts")}
        beside = {end - start for (_, start), (_, end) in pairs}
        copies = 2
        assert (min(beside) > copies) == (arch != "qwen3_moe"), "the device has the shared expert meanwhile"
        alone = {each.request_id: run(engine, [each])[each.request_id] for each in REQUESTS}
    for name, outputs in together.items():
        assert [token for output in outputs for token in output.token_ids] == expected[name]
        assert chances(outputs) == chances(alone[name])
    assert "experts are in main memory" in " ".join(info.notes)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "Q8_0"])
def test_experts_are_packed_as_on_a_cpu(mixture, tmp_path, monkeypatch, form):
    """Quantized at load, and in the blocks of a GGUF file, of which the rest is dequantized for the GPU."""
    folder, quant = mixture, form
    if form == "Q8_0":
        file = write_gguf(mixture, tmp_path / "tiny.gguf", form)
        folder, quant = folder_of(file, tmp_path / "home"), "none"
    whole = on_cpu(monkeypatch, folder, quant=quant)
    with fake_cuda(Card(multiprocessors=2), blank=True):
        engine = load(folder, quant=quant, **ON_GPU)
        assert engine.info.quant == quant
        assert engine.info.expert_quant == ("gguf" if form == "Q8_0" else "int8")
        found = packed_bytes(engine, None)
    assert found == packed_bytes(whole, None)
    assert len(found) == 16
    assert {name for name, _ in found} != {""}


def test_what_cannot_be_is_refused_in_a_sentence(mixture, tmp_path, monkeypatch):
    dense = make_tiny_model(tmp_path / "dense", num_hidden_layers=1, vocab_size=99)

    def refused(folder, error, words, **options):
        with pytest.raises(error, match=words):
            load(folder, **{**ON_GPU, **options})

    with fake_cuda(Card(multiprocessors=2)):
        refused(dense, DeviceError, "this model has no experts: load it without --cpu-experts")
        refused(mixture, ParallelError, "are for a model on one GPU: load it without --tp, --pp", tp=2)
        refused(mixture, DeviceError, "use --dtype bfloat16", dtype="float16")
        refused(mixture, DeviceError, "cannot be w8a8, which runs on GPUs only", quant="w8a8")
        refused(mixture, DeviceError, "load it without --draft", draft_path=str(dense))
        words = "rows of drafts dear: load with --speculate auto or off"
        refused(mixture, DeviceError, words, speculate="on", deterministic=True)
        words = "experts in main memory need .* as float32 and have .*: --quant int8 or int4 takes less"
        refused(mixture, DoesNotFit, words, host_bytes_limit=1 << 10)
    monkeypatch.delenv("LLMBOX_KERNELS")
    refused(mixture, DeviceError, "runs on the CPU, and its experts too", device="cpu")


def test_deterministic_kernels_verify_no_drafts_beside_them(mixture):
    def rows(**options):
        with fake_cuda(Card(multiprocessors=2), blank=True):
            engine = load(mixture, **{**ON_GPU, "speculate": "auto", "deterministic": True, **options})
        return engine.scheduler.config.draft_rows

    assert rows() == 0
    assert rows(cpu_experts="off") > 0


def test_adapters_of_experts_are_refused_and_others_are_not(mixture, tmp_path):
    fused = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    base = hf_model(mixture)
    for name, kind in (("attention", {"target_modules": ["q_proj"]}), ("experts", fused)):
        make_adapter(base, tmp_path / name, r=4, **kind)
    with fake_cuda(Card(multiprocessors=2), blank=True):
        engine = load(mixture, **ON_GPU)
        layers = runner_of(engine)._model.adapters
        layers.match(read_adapter(tmp_path / "attention"))
        words = "adapters of experts in main memory are not applied beside a model: `llmbox lora merge`"
        with pytest.raises(AdapterError, match=words):
            layers.match(read_adapter(tmp_path / "experts"))


def test_a_card_that_is_too_small_gives_up_the_experts(mixture, monkeypatch):
    """By itself, unless that is off."""
    options = {**ON_GPU, "cpu_experts": "auto"}
    config = EngineConfig(model_path=str(mixture), name="tiny", threads=1, **options)
    with fake_cuda(Card(multiprocessors=2), blank=True):
        assert load_engine(config, lambda _: None).info.expert_bytes == 0
    with monkeypatch.context() as sizes:
        # All that is on the device fits, and the experts beside it do not.
        sizes.setattr("llmbox.engine.planning.planner.weights_bytes", enlarged)
        with fake_cuda(Card(multiprocessors=2), blank=True):
            assert load_engine(config, lambda _: None).info.expert_bytes > 0
            with pytest.raises(DoesNotFit) as refusal:
                load_engine(replace(config, cpu_experts="off"), lambda _: None)
            assert "--cpu-experts" not in str(refusal.value)
            with pytest.raises(DoesNotFit, match=r"With --cpu-experts on: experts in main memory need"):
                load_engine(replace(config, host_bytes_limit=1 << 10), lambda _: None)


def enlarged(shape, dtype, quant):
    return (100 << 30) if shape.routed_params else 1 << 20
