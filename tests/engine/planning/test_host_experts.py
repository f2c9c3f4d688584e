"""Plans of mixtures with experts in main memory and all else on a GPU."""

from dataclasses import replace

import pytest

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, DoesNotFit, EngineError
from llmbox.engine.model_config.shape import ExpertShape, ModelShape
from llmbox.engine.planning.estimator import MemoryBudget, estimate, plans
from llmbox.engine.planning.memory_model import weights_bytes
from llmbox.engine.planning.performance_model import expert_step_bytes
from llmbox.kernels.quant_formats import QUANTS, BlockSizes

GB = 10**9
MIXTURE = ModelShape(
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    ffn=6144,
    vocab=151936,
    tied=False,
    context_limit=32768,
    qk_norm=True,
    experts=ExpertShape(count=128, per_token=8, inner=768, layers=48),
)
ROUTED = 48 * 128 * 3 * 2048 * 768
CARD = MemoryBudget(device="cuda", available=24 * GB, cores=8, host_available=200 * GB, host_native=True)


def plan(shape=MIXTURE, budget=CARD, **options):
    return estimate(shape, budget, EngineConfig(model_path="m", name="m", **options))


def test_a_mixture_too_large_for_the_card_gives_up_its_experts_alone():
    got = plan()
    assert MIXTURE.routed_params == ROUTED
    assert got.weights_bytes == (MIXTURE.params - ROUTED) * 2
    assert (got.expert_quant, got.tp, got.pp, got.gpus) == ("none", 1, 1, (0,))
    rows = got.step_tokens
    copies = (rows * 8 + 16 * 128) * (2 * 2048 + 3 * 768) * 2
    assert got.expert_bytes == ROUTED * 2 + copies + rows * (4 * 2048 * 2 + 4 * 129)
    assert got.total_bytes < 24 * GB
    assert "CUDA graphs are off" in " ".join(got.notes)
    assert got.workspace_bytes < plan(budget=replace(CARD, available=80 * GB)).workspace_bytes, "no graphs"


def test_one_that_fits_keeps_them_unless_asked():
    large = replace(CARD, available=80 * GB)
    assert plan(budget=large).expert_bytes == 0
    assert plan(budget=large, cpu_experts="on").expert_bytes > 0
    pair = replace(CARD, available=48 * GB, more_gpus=(48 * GB,))
    assert (plan(budget=pair).pp, plan(budget=pair).expert_bytes) == (2, 0), "two cards are faster than a CPU"
    assert plan(budget=pair, cpu_experts="on").ranks == 1
    assert plan(quant="int4").expert_bytes == 0
    assert plan(quant="auto").expert_bytes == 0
    with pytest.raises(DoesNotFit):
        plan(cpu_experts="off")


def test_any_card_with_room_will_do():
    budget = replace(CARD, available=2 * GB, more_gpus=(24 * GB, 24 * GB))
    asked = EngineConfig(model_path="m", name="m", cpu_experts="on")
    assert [each.gpus for each in plans(MIXTURE, budget, asked)] == [(1,), (2,)]


def test_evicted_blocks_get_a_share_of_what_experts_leave():
    got = plan()
    assert got.host_bytes == int(0.2 * (200 * GB - got.expert_bytes))
    assert plan(kv_host_bytes=GB).host_bytes == GB
    limited = plan(host_bytes_limit=100 * GB)
    assert limited.host_bytes == int(0.2 * (100 * GB - limited.expert_bytes))
    with pytest.raises(DoesNotFit, match=r"40\.0 GB, 80% of what is free: --quant int8 or int4 takes less"):
        plan(host_bytes_limit=50 * GB)
    assert plan(replace(MIXTURE, experts=None), host_bytes_limit=10 * GB).host_bytes == 2 * GB


def test_formats_of_experts_are_those_of_the_cpu():
    assert plan(cpu_experts="on", quant="int8").expert_quant == "int8"
    small = replace(CARD, host_available=60 * GB)
    tight = plan(budget=small, cpu_experts="on", quant="auto")
    assert (tight.quant, tight.expert_quant) == ("none", "int8"), "each takes the first that fits"
    blocks = BlockSizes(layers=0.6, head=0.8, table=0.6, unit=256)
    gguf = plan(replace(MIXTURE, quant="gguf", stored="GGUF", blocks=blocks), small, cpu_experts="on")
    assert (gguf.quant, gguf.expert_quant) == ("none", "gguf")
    assert int(ROUTED * 0.6) < gguf.expert_bytes < int(ROUTED * 0.6) + GB
    assert gguf.weights_bytes == (MIXTURE.params - ROUTED) * 2, "no kernels of GPUs have its blocks"
    fp8 = plan(replace(MIXTURE, quant="fp8-block", stored="fp8-block"), cpu_experts="on")
    assert (fp8.quant, fp8.expert_quant) == ("fp8-block", "none"), "dequantized for the CPU"
    assert fp8.weights_bytes < 0.75 * gguf.weights_bytes
    with pytest.raises(DoesNotFit, match=r"as bfloat16 and have .*: --quant auto takes less"):
        plan(replace(MIXTURE, quant="fp8-block", stored="fp8-block"), small, cpu_experts="on")
    awq = plan(replace(MIXTURE, quant="w4a16-g128", stored="awq"), cpu_experts="on")
    assert (awq.quant, awq.expert_quant) == ("w4a16-g128", "w4a16-g128")
    with pytest.raises(DeviceError, match="cannot be fp8, which runs on GPUs only: load with --quant int8"):
        plan(cpu_experts="on", quant="fp8")


def test_float16_becomes_what_both_compute():
    half = replace(MIXTURE, dtype="float16")
    assert plan(half, cpu_experts="on").dtype == "bfloat16"
    assert plan(half, replace(CARD, available=80 * GB)).dtype == "float16"


@pytest.mark.parametrize(
    ("changes", "budget", "options", "words"),
    [
        ({"experts": None}, {}, {}, "this model has no experts"),
        ({}, {"device": "cpu"}, {}, "the model runs on the CPU, and its experts too"),
        ({}, {}, {"tp": 2}, "for a model on one GPU: load it without --tp, --pp and --expert-parallel"),
        ({}, {}, {"pp": 2}, "for a model on one GPU"),
        ({}, {}, {"gpus": (0, 1)}, "the model was given 2 GPUs: choose one"),
        ({}, {}, {"dtype": "float16"}, "use --dtype bfloat16"),
        ({}, {}, {"mtp": "on"}, "drafts cannot be combined with experts in main memory"),
        ({}, {"host_native": False}, {}, "there is no compiler for them: see `llmbox doctor`"),
    ],
)
def test_what_cannot_be_says_why(changes, budget, options, words):
    shape, budget = replace(MIXTURE, **changes), replace(CARD, **budget)
    with pytest.raises(EngineError, match=words) as refusal:
        plan(shape, budget, cpu_experts="on", **options)
    assert str(refusal.value).startswith("--cpu-experts on was asked for, but ")
    if budget.device == "cuda" and "gpus" not in options and shape.experts:
        with pytest.raises(EngineError) as alone:
            plan(shape, budget, **options)
        assert "--cpu-experts" not in str(alone.value), "nobody asked"


def test_sizes_without_experts_and_what_a_token_reads_of_them():
    rest = MIXTURE.without_routed()
    assert rest.params == MIXTURE.params - ROUTED
    assert (rest.routed_params, rest.unread_params(1)) == (0, 0)
    assert replace(MIXTURE, experts=None).without_routed() == replace(MIXTURE, experts=None)
    for name in ("none", "int8", "int4", "int4-mix"):
        quant = QUANTS.get(name)
        each = quant.bytes_per_weight if quant else 2
        if name == "int4-mix":  # some of the downs have more bits
            each += 24 / 48 / 3 * (quant.head.bytes_per_weight - each)
        parts = weights_bytes(rest, "bfloat16", quant) + ROUTED * each
        assert parts == pytest.approx(weights_bytes(MIXTURE, "bfloat16", quant), rel=1e-3)
        read = expert_step_bytes(MIXTURE, "bfloat16", rows=1, quant=quant)
        assert read == pytest.approx(ROUTED * each * 8 / 128, rel=1e-3)
