"""Facts from config and headers, without a download, and the verdict from them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from llmbox.app.fit.bandwidth import Bandwidth
from llmbox.app.fit.fit import Fit, FitSite, fit
from llmbox.app.fit.report import fit_rows, plan_rows
from llmbox.app.hub.errors import HubError
from llmbox.app.hub.model_info import local_facts, remote_facts, search
from llmbox.app.hub.repo_files import Hub
from llmbox.app.models.catalog import directory
from llmbox.app.util.formatting import size
from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import ModelError
from llmbox.engine.hardware.gpus import Gpu
from llmbox.engine.hardware.machine import Cpu, Machine, Memory, show_bytes
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.planning.estimator import MemoryBudget, estimate
from support.hub_models import CONFIG, model_files, safetensors_header, tensors_of
from support.hub_stub import StubHub, StubRepo, stub_hub
from support.tiny_models import tiny_config

NAME = "org/little"
MACHINE = Machine(
    Cpu("test", 4, 8, ()), Memory(16_000_000_000, 12_000_000_000, limited_by_cgroup=False), (), "none"
)
GPU = Gpu(0, "Test GPU", "GPU-0", 24_000_000_000, 23_000_000_000, 1e10)


@pytest.fixture
def hub():
    with stub_hub() as stub:
        stub.repos[NAME] = StubRepo(model_files())
        yield stub


def facts(hub: StubHub, name: str = NAME):
    return remote_facts(Hub(hub.url, None), name, None)


def verdict(found: Any, machine: Machine = MACHINE, budget_gb: float | None = None, **options: Any) -> Fit:
    config = EngineConfig(model_path="", name="", **options)
    site = FitSite(machine=machine, budget_gb=budget_gb, disk=Path("/tmp"), bandwidth=Bandwidth.exact(1e10))
    return fit(found, config, site)


@pytest.mark.parametrize("shards", [False, True])
def test_the_hub_and_the_disk_tell_the_same(hub: StubHub, tmp_path: Path, shards: bool):
    hub.repos[NAME] = StubRepo(model_files(shards=shards))
    remote = facts(hub)
    for name, data in hub.repos[NAME].files.items():
        (tmp_path / name).write_bytes(data)
    local = local_facts(directory(tmp_path))
    assert (remote.config, remote.stored_bytes, remote.stored_params) == (
        local.config,
        local.stored_bytes,
        local.stored_params,
    )
    assert remote.stored_params == remote.config.num_parameters
    assert remote.notes == ()
    assert local.missing_bytes == 0


class SparseFile(bytes):
    """A file of `size` zeros behind its header, which take no memory."""

    size: int

    def __new__(cls, header: bytes, size: int) -> Self:
        file = super().__new__(cls, header)
        file.size = size
        return file

    def __len__(self) -> int:
        return super().__len__() + self.size

    def __getitem__(self, piece: Any) -> Any:
        return super().__getitem__(piece).ljust(piece.stop - piece.start, b"\0")


def test_only_headers_are_read(hub: StubHub):
    """A model of 16 GB that exists only as its header, which is longer than the first piece."""
    config = {**CONFIG, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
              "tie_word_embeddings": False, "max_position_embeddings": 8192}  # fmt: skip
    header, size = safetensors_header(tensors_of(config), pad=70_000)
    hub.repos[NAME].files = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": SparseFile(header, size),
    }
    found = facts(hub)
    assert found.stored_params == found.config.num_parameters == 8_030_261_248
    assert found.missing_bytes > 16_000_000_000
    asked = [seen.headers["Range"] for seen in hub.requests("cdn")]
    assert asked == ["bytes=0-65535", f"bytes=65536-{len(header) - 1}"]
    refused = verdict(found)
    assert refused.plan is None
    assert not refused.fits
    assert "16.1 GB" in refused.reason
    roomy = replace(MACHINE, memory=replace(MACHINE.memory, total=13_000_000_000))
    assert any(remedy.startswith("--quant int4: ") for remedy in verdict(found, roomy).remedies)
    on_gpu = verdict(found, replace(MACHINE, gpus=(GPU,)))
    assert on_gpu.device == "cuda"
    assert on_gpu.plan is not None
    assert on_gpu.plan.context == 8192
    assert on_gpu.speed is not None
    low, high = on_gpu.speed.one_stream
    assert 0.3 < low < high < 10


def test_it_is_the_function_that_sizes_the_pool(hub: StubHub):
    found = facts(hub)
    config = EngineConfig(model_path="", name="", memory_bytes=100_000_000)
    shown = verdict(found, memory_bytes=100_000_000)
    budget = replace(MemoryBudget.of(MACHINE, "cpu"), available=10**10)
    assert shown.plan == estimate(found.config.shape(), budget, config)


def test_main_memory_beside_a_gpu_is_told(hub: StubHub):
    assert "main memory" not in fit_rows(verdict(facts(hub)))
    plan = verdict(facts(hub)).plan
    assert plan is not None
    told = plan_rows(replace(plan, host_bytes=10**9))["main memory"]
    assert told.startswith("at most 1.0 GB for KV blocks that the GPU evicts, ")
    assert told.endswith(f"{10**9 // plan.kv_bytes_per_token:,} tokens")


def test_the_size_of_the_cache_on_disk_is_told(hub: StubHub):
    config = EngineConfig(model_path="", name="")
    site = FitSite(machine=MACHINE, budget_gb=None, disk=Path("/tmp"), bandwidth=None, kv_disk=10**9)
    told = fit(facts(hub), config, site)
    assert told.plan is not None
    assert told.plan.buffer_bytes > 0
    assert told.as_dict()["plan"]["kv_disk_tokens"] == 10**9 // told.plan.kv_bytes_per_token
    assert f"{told.kv_disk_tokens:,} tokens of this one" in fit_rows(told)["KV on disk"]
    off = fit(facts(hub), replace(config, prefix_cache=False), site)
    assert off.plan is not None
    assert (off.kv_disk_bytes, off.plan.buffer_bytes) == (0, 0)
    assert "KV on disk" not in fit_rows(off)


def test_what_would_make_it_fit_is_said(hub: StubHub):
    found = facts(hub)
    tight = verdict(found, budget_gb=0.05, context=256, max_running=8192)
    assert tight.plan is None
    assert any(remedy.startswith("--max-running 1") for remedy in tight.remedies)
    assert not verdict(found).remedies


BIG = {**CONFIG, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 20,
       "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
       "tie_word_embeddings": False, "max_position_embeddings": 8192}  # fmt: skip
"""About 19 billion parameters: more than one of the GPUs below holds."""


def big(hub: StubHub):
    weights = SparseFile(*safetensors_header(tensors_of(BIG)))
    hub.repos[NAME].files = {"config.json": json.dumps(BIG).encode(), "model.safetensors": weights}
    return facts(hub)


def gpus(count: int, *, nvlink: bool = True) -> Machine:
    found = tuple(replace(GPU, index=n, uuid=f"GPU-{n}") for n in range(count))
    return replace(MACHINE, gpus=found, nvlink=(frozenset(range(count)),) if nvlink else ())


def test_tensor_parallel_halves_what_each_gpu_holds(hub: StubHub):
    found = big(hub)
    assert verdict(found, gpus(1)).plan is None
    two, four = verdict(found, gpus(4), tp=2), verdict(found, gpus(4), tp=4)
    assert two.plan is not None
    assert four.plan is not None
    assert two.plan.weights_bytes == pytest.approx(found.stored_bytes / 2, rel=0.02)
    assert four.plan.weights_bytes == pytest.approx(found.stored_bytes / 4, rel=0.02)
    assert four.plan.kv_bytes_per_token * 4 == 2 * 20 * 8 * 128 * 2
    assert two.speed is not None
    assert four.speed is not None
    assert 1.5 < two.speed.scaling < 2.0 < four.speed.scaling < 4.0
    # 2 (t - 1) / t of a row of 8192 numbers, twice a layer and once for the embedding.
    assert two.speed.sums_bytes == (2 * 20 + 1) * 8192 * 2


def test_slow_links_cost_speed_and_ranks_on_a_cpu_gain_none(hub: StubHub):
    found = big(hub)
    fast, slow = verdict(found, gpus(2), tp=2), verdict(found, gpus(2, nvlink=False), tp=2)
    assert fast.speed is not None
    assert slow.speed is not None
    assert slow.speed.scaling < fast.speed.scaling
    roomy = replace(MACHINE, memory=replace(MACHINE.memory, total=80_000_000_000))
    on_cpu = verdict(found, roomy, device="cpu", tp=2)
    assert on_cpu.speed is not None
    assert on_cpu.speed.scaling <= 1.0


def test_ranks_on_unequal_gpus_are_as_fast_as_the_slowest(hub: StubHub):
    found, equal = big(hub), gpus(3)
    unequal = replace(equal, gpus=(*equal.gpus[:1], replace(equal.gpus[1], bandwidth=3e9), *equal.gpus[2:]))
    speeds = [verdict(found, machine, tp=2).speed for machine in (equal, unequal)]
    assert [speed.bandwidth.best for speed in speeds if speed is not None] == [1e10, 3e9]


def test_what_cannot_be_cut_says_how_it_can(hub: StubHub):
    found = big(hub)
    refused = verdict(found, gpus(4), tp=3)
    assert refused.plan is None
    assert "64 attention heads cannot be shared equally" in refused.reason
    assert any(remedy.startswith("--tp 2: ") for remedy in refused.remedies)
    assert verdict(found, gpus(1), tp=2).plan is None


def mixture(hub: StubHub, folder: Path) -> Any:
    """61 GB of weights, of which a token reads 3.1 billion: not those of experts that it does not choose."""
    sizes = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3_moe") | sizes))
    return replace(facts(hub), config=parse_config(folder))


def roomy(gigabytes: int = 200) -> Machine:
    memory = Memory(gigabytes * 10**9, gigabytes * 10**9, limited_by_cgroup=False)
    return replace(gpus(1), memory=memory)


def test_a_mixture_larger_than_the_gpu_is_proposed_for_main_memory(hub: StubHub, tmp_path: Path):
    found = mixture(hub, tmp_path)
    refused = verdict(found, roomy(), cpu_experts="off")
    assert refused.device == "cuda"
    assert refused.plan is None
    (told,) = (each for each in refused.remedies if each.startswith("--device cpu: "))
    on_cpu = verdict(found, roomy(), device="cpu")
    assert on_cpu.plan is not None
    assert f"{show_bytes(on_cpu.plan.total_bytes)} of main memory" in told
    assert told.endswith("a token reads 6.1 GB of weights")
    assert not any(each.startswith("--device cpu") for each in verdict(found, gpus(1)).remedies), "too small"
    assert not any(each.startswith("--device cpu") for each in verdict(big(hub), roomy()).remedies), (
        "is dense"
    )
    (told,) = (each for each in refused.remedies if each.startswith("--cpu-experts on: "))
    assert re.search(r"of the GPU and 58\.\d GB of main memory with a context of \d+ tokens", told)


def test_a_mixture_larger_than_the_gpu_has_its_experts_in_main_memory(hub: StubHub, tmp_path: Path):
    """58 GB of experts, of which a token reads 3.6; the GPU has the other 3 GB."""
    found = mixture(hub, tmp_path)
    result = verdict(found, roomy())
    plan = result.plan
    assert result.fits
    assert plan is not None
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert plan.weights_bytes == found.config.shape().params * 2 - experts
    assert experts < plan.expert_bytes < 1.1 * experts
    told = f"{size(plan.expert_bytes)} of main memory as bfloat16, which the CPU computes"
    assert fit_rows(result)["experts"] == told
    assert any(each.startswith("--device cpu: ") for each in result.remedies)
    assert result.speed is None, "nobody has measured main memory"
    assert verdict(found, roomy(), tp=2).plan is None


def test_the_speed_beside_experts_in_main_memory_is_of_both(hub: StubHub, tmp_path: Path):
    found, host = mixture(hub, tmp_path), Bandwidth(best=50e9, typical=40e9, probed_at=0.0)
    site = FitSite(
        machine=roomy(),
        budget_gb=None,
        disk=tmp_path,
        bandwidth=Bandwidth.exact(1e12),
        host_bandwidth=lambda: host,
    )
    found_fit = fit(found, EngineConfig(model_path="", name=""), site)
    speed, plan = found_fit.speed, found_fit.plan
    assert speed is not None
    assert plan is not None
    read = 48 * 8 * 3 * 2048 * 768 * 2
    assert speed.host_read == pytest.approx(read, rel=1e-6)
    shape = found.config.shape()
    matmuls = shape.matmul_params * 2 - 48 * 128 * 3 * 2048 * 768 * 2
    card = matmuls + plan.context // 4 * plan.kv_bytes_per_token
    # The data sheet's bandwidth of the GPU, as it is the one of `gpus`.
    assert speed.one_stream[1] == pytest.approx(1 / (card / speed.bandwidth.best + read / 50e9), rel=0.01)
    assert speed.one_stream[0] < 0.6 * speed.one_stream[1]
    told = fit_rows(found_fit)["experts at"]
    assert told.startswith(
        "a token of one stream reads 3.6 GB of main memory, which reads 40.0 GB/s as a rule"
    )


@pytest.mark.parametrize(
    ("gigabytes", "options", "words"),
    [
        (60, {}, "experts in main memory need 58.3 GB as bfloat16 and have 48.0 GB, 80% of what is free"),
        (20, {"quant": "int8"}, "as int8 and have 16.0 GB, 80% of what is free: more main memory is needed"),
    ],
)
def test_main_memory_that_is_too_small_is_told(
    hub: StubHub, tmp_path: Path, gigabytes: int, options: dict[str, Any], words: str
):
    result = verdict(mixture(hub, tmp_path), roomy(gigabytes), **options)
    assert not result.fits
    assert "With --cpu-experts on: " in result.reason
    assert words in result.reason
    fewer = verdict(mixture(hub, tmp_path), roomy(gigabytes), **{"quant": "auto", **options})
    assert fewer.fits == (not options), "int8 experts have room in 60 GB"


def test_quantized_weights_are_read_faster(hub: StubHub):
    found = big(hub)
    plain, packed = verdict(found, gpus(2), tp=2), verdict(found, gpus(1), quant="int4")
    assert plain.speed is not None
    assert packed.speed is not None
    assert packed.speed.one_stream > plain.speed.one_stream


def test_a_full_disk_is_part_of_the_verdict(hub: StubHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("llmbox.app.fit.fit.free_space", lambda _: 1000)
    full = verdict(facts(hub))
    assert full.plan is not None
    assert not full.fits
    assert "the disk has 0.0 MB free" in full.reason


def test_config_and_weights_that_disagree_are_refused(hub: StubHub):
    config = {**CONFIG, "num_hidden_layers": 4}
    hub.repos[NAME].files["config.json"] = json.dumps(config).encode()
    with pytest.raises(HubError) as caught:
        facts(hub)
    assert "is missing" in caught.value.why


def test_other_numbers_of_parameters_are_noted(hub: StubHub):
    found = facts(hub)
    assert not found.notes
    assert "config.json describes" in replace(found, stored_params=2 * found.stored_params).notes[0]


def test_what_model_optimizer_says_in_its_own_file_is_read_as_well(hub: StubHub):
    told = {"quantization": {"quant_algo": "FP8"}}
    hub.repos[NAME].files["hf_quant_config.json"] = json.dumps(told).encode()
    assert facts(hub).config.quant == "fp8-static"


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 8, (20).to_bytes(8, "little") + b"not json", b"\x02" + bytes(7) + b"[]", bytes(3000)],
)
def test_broken_headers_are_refused(hub: StubHub, header: bytes):
    hub.repos[NAME].files["model.safetensors"] = header + bytes(1200)
    with pytest.raises(HubError) as caught:
        facts(hub)
    assert caught.value.code == "unsupported_model"


@pytest.mark.parametrize(
    "config",
    [b'{"x": ' + b"[" * 4000 + b"]" * 4000 + b"}", json.dumps({**CONFIG, "vocab_size": 10**12}).encode()],
)
def test_a_hostile_config_is_refused(hub: StubHub, config: bytes):
    hub.repos[NAME].files["config.json"] = config
    with pytest.raises(HubError) as caught:
        facts(hub)
    assert caught.value.code == "unsupported_model"


def test_unsupported_architectures_name_no_path_of_ours(hub: StubHub, tmp_path: Path):
    hub.repos[NAME].files["config.json"] = json.dumps({**CONFIG, "architectures": ["Odd"]}).encode()
    with pytest.raises(HubError) as caught:
        facts(hub)
    assert "Odd is not supported" in str(caught.value)
    assert "/tmp" not in str(caught.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError):
        local_facts(directory(tmp_path))


def test_search_says_of_each_result_whether_it_fits(hub: StubHub):
    hub.repos |= {
        "org/gated": StubRepo(model_files(), gated=True),
        "org/odd": StubRepo({"config.json": b"{}"}),
        "other/x": StubRepo(model_files()),
    }
    found = search(Hub(hub.url, None), "org", 10, lambda config: (None, f"{config.num_layers} layers"))
    assert {hit.name: hit.fits for hit in found} == {
        NAME: "no",
        "org/gated": "unknown",
        "org/odd": "unsupported",
    }
    assert found[0].detail == "2 layers"
