import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, DoesNotFit
from llmbox.engine.model_config.shape import RecurrentShape
from llmbox.engine.planning.estimator import (
    MemoryBudget,
    MemoryPlan,
    ModelShape,
    estimate,
    resolve_dtypes,
    show_bytes,
)
from llmbox.engine.planning.memory_model import (
    Workspace,
    adapter_scratch,
    capture_sizes,
    graphs_reserve,
)
from llmbox.engine.planning.performance_model import decode_tokens_per_second
from llmbox.kernels.lora import TILE_ROWS
from support.shapes import LLAMA_3_8B, MISTRAL_7B, QWEN_2_500M, QWEN_3_600M

GB = 10**9

TINY = ModelShape(
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=768,
    vocab=4096,
    tied=True,
    context_limit=2048,
    dtype="float32",
)


def plan(shape: ModelShape, available: float, device="cpu", native_kernels=False, **config) -> MemoryPlan:
    budget = MemoryBudget(device=device, available=int(available), cores=2, native_kernels=native_kernels)
    return estimate(shape, budget, EngineConfig(model_path="m", name="m", **config))


# ---------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        (LLAMA_3_8B, 8_030_261_248),
        (QWEN_3_600M, 596_049_920),
        (QWEN_2_500M, 494_032_768),
        (MISTRAL_7B, 7_241_732_096),
    ],
)
def test_published_parameter_counts(shape, params):
    assert shape.params == params


def test_exact_counts_win():
    assert replace(LLAMA_3_8B, exact_params=5).params == 5


def test_kv_bytes_per_token():
    assert LLAMA_3_8B.kv_bytes_per_token("bfloat16") == 131_072
    assert QWEN_3_600M.kv_bytes_per_token("bfloat16") == 114_688
    assert QWEN_3_600M.kv_bytes_per_token("float32") == 229_376
    for one_byte in ("int8", "fp8"):  # 28 layers of 8 heads: 128 numbers and a scale, for K and for V
        assert QWEN_3_600M.kv_bytes_per_token(one_byte) == 2 * 28 * 8 * (128 + 4)


def test_heads_are_counted_as_wide_as_the_kernels_keep_them():
    odd = replace(TINY, head_dim=80, dtype="bfloat16")

    def kept(level, native=True, **config):
        budget = MemoryBudget(device="cpu", available=8 * GB, cores=2, native_kernels=native, level=level)
        planned = estimate(odd, budget, EngineConfig(model_path="m", name="m", **config))
        assert planned.kv_bytes <= planned.budget_bytes - planned.weights_bytes - planned.workspace_bytes
        return planned.kv_bytes_per_token // (2 * TINY.layers * TINY.kv_heads)

    assert kept("amx") == 96 * 2, "whole tiles"
    assert kept("avx512-bf16") == 80 * 2
    assert kept("amx", kv_dtype="int8") == 80 + 4
    assert kept("amx", native=False, dtype="bfloat16") == 80 * 2


def test_int8_keys_and_values_leave_room_for_more_tokens():
    plain, small = plan(LLAMA_3_8B, 24 * GB, "cuda"), plan(LLAMA_3_8B, 24 * GB, "cuda", kv_dtype="int8")
    assert small.kv_dtype == "int8"
    assert small.num_blocks / plain.num_blocks == pytest.approx(2 * 128 / 132, rel=1e-3)
    assert small.num_blocks * 16 * small.kv_bytes_per_token <= small.budget_bytes - small.weights_bytes


def test_fp8_keys_and_values_need_a_gpu():
    assert plan(LLAMA_3_8B, 24 * GB, "cuda", kv_dtype="fp8").kv_dtype == "fp8"
    with pytest.raises(DeviceError, match="--kv-dtype int8"):
        plan(TINY, GB, kv_dtype="fp8")


def test_llama_on_a_24_gb_gpu():
    got = plan(LLAMA_3_8B, 24 * GB, "cuda")
    assert got.weights_bytes == 16_060_522_496
    assert got.context == 8192
    assert (got.dtype, got.kv_dtype, got.max_running, got.token_budget) == ("bfloat16", "bfloat16", 256, 2048)
    room = int(24 * GB * 0.85) - got.weights_bytes - got.workspace_bytes
    assert got.num_blocks == room // (16 * 131_072)
    assert got.max_concurrency == pytest.approx(got.num_blocks * 16 / 8192)


def test_main_memory_for_blocks_that_a_gpu_evicts():
    def kept(device="cuda", gpus=(), **config):
        budget = MemoryBudget(
            device=device, available=24 * GB, cores=2, more_gpus=gpus, host_available=50 * GB
        )
        return estimate(LLAMA_3_8B, budget, EngineConfig(model_path="m", name="m", **config))

    assert kept().host_bytes == 10 * GB
    assert kept().total_bytes == replace(kept(), host_bytes=0).total_bytes, "it is not the device's"
    assert kept(kv_host_bytes=3 * GB).host_bytes == 3 * GB
    lowered = kept(kv_host_bytes=60 * GB)
    assert lowered.host_bytes == 40 * GB
    assert "main memory for evicted KV blocks lowered from 60.0 GB to 40.0 GB" in " ".join(lowered.notes)
    for nothing in (kept(kv_host_bytes=0), kept(prefix_cache=False), kept(gpus=(24 * GB,), tp=2)):
        assert nothing.host_bytes == 0
    assert kept("cpu", kv_host_bytes=3 * GB).host_bytes == 0, "device and host are one memory"


def test_workspace_by_hand():
    got = Workspace("cpu", "float32", context=2048, max_running=4).peak_bytes(TINY, 64)
    activations = 64 * ((3 * 256 + 3 * 768) * 4 + 2 * 256 * 4)
    attention = 2 * (4 * 64 * 2048 * 4) + 3 * 2048 * 2 * 64 * 4
    logits = 4096 * ((4 + 64) * 8 + 32)
    runtime = 20 << 20
    assert got == activations + attention + 2 * 2048 * 64 * 4 + logits + runtime


def test_adapters_have_memory():
    graphs = graphs_reserve(2) - graphs_reserve(1)  # steps with adapters have their own
    for device, more in (("cpu", 0), ("cuda", len(capture_sizes(256)) * graphs)):
        without, some = (
            plan(QWEN_3_600M, 24 * GB, device, lora_bytes=3 * GB, plans_adapters=has) for has in (False, True)
        )
        scratch = adapter_scratch(device, some.token_budget)
        assert scratch > 0
        assert some.workspace_bytes - without.workspace_bytes == 3 * GB + scratch + more


def test_scratch_of_adapters_is_what_the_kernels_take():
    """Query, key and value of rank 256 each, for the rows of a step."""
    assert adapter_scratch("cpu", 8192) >= 8192 * 3 * 256 * 4
    triton = pytest.importorskip("llmbox.kernels.triton.linear.lora")
    assert adapter_scratch("cuda", 8192) == triton.LOW_BYTES
    assert triton.LOW_BYTES >= triton.SPLITS * TILE_ROWS * 5 * 256 * 4, "a launch has one tile or more"
    assert adapter_scratch("cuda", 8192, 8) > triton.LOW_BYTES + 8192 * 8 * 4 * (1 + TILE_ROWS)


def test_the_cpp_kernels_keep_a_tile_of_scores_a_thread():
    stock, native = (
        Workspace("cpu", "float32", 2048, 4, threads).peak_bytes(TINY, 64) for threads in (None, 3)
    )
    attention = 2 * (4 * 64 * 2048 * 4) + 3 * 2048 * 2 * 64 * 4
    assert stock - native == attention - 3 * (1 << 20)


def test_a_small_model_takes_only_what_it_needs():
    got = plan(TINY, 64 * GB)
    assert got.num_blocks == got.max_running * 2048 // 16
    assert got.max_concurrency == got.max_running == 32
    assert got.total_bytes - got.buffer_bytes < GB / 2


SMOL = ModelShape(
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab=49_152,
    tied=True,
    context_limit=8192,
    dtype="bfloat16",
)
"""135 M parameters; a token's keys and values take 23 kB."""


def test_a_pool_that_nobody_asked_for_is_bounded_on_a_cpu():
    context = 8192 * 23_040
    small = plan(SMOL, 25 * GB, dtype="bfloat16")
    assert small.kv_bytes == 512 * 2**20 // (16 * 23_040) * 16 * 23_040
    assert small.total_bytes < 1.2 * GB, "all 32 contexts would be 6 GB"
    assert small.context == 8192
    (note,) = small.notes
    assert note.startswith("the KV cache holds 2.8 whole contexts: by default at most 512 MiB")
    asked = plan(SMOL, 25 * GB, dtype="bfloat16", max_running=32)
    assert (asked.kv_bytes, asked.notes) == (32 * context, ())
    given = plan(SMOL, 25 * GB, dtype="bfloat16", memory_bytes=5 * GB)
    assert 4.99 * GB < given.total_bytes <= 5 * GB
    limited = plan(SMOL, 25 * GB, dtype="bfloat16", memory_bytes=5 * GB, memory_is_limit=True)
    assert limited.kv_bytes == small.kv_bytes
    on_gpu = plan(SMOL, 25 * GB, "cuda")
    assert on_gpu.total_bytes > 0.8 * 25 * GB


def test_a_default_pool_holds_a_whole_context_and_grows_with_the_weights():
    long = plan(replace(SMOL, context_limit=65_536), 25 * GB, dtype="bfloat16")
    assert long.num_blocks * 16 == long.context == 65_536
    large = plan(replace(SMOL, exact_params=10**9), 25 * GB, dtype="bfloat16")
    assert large.kv_bytes == pytest.approx(8 * 8192 * 23_040), "eight contexts are less than the weights"
    middle = plan(replace(SMOL, exact_params=5 * 10**8), 25 * GB, dtype="bfloat16")
    assert middle.kv_bytes == pytest.approx(middle.weights_bytes, rel=1e-3)
    ranks = plan(SMOL, 25 * GB, dtype="bfloat16", tp=3)
    assert ranks.kv_bytes * 3 == pytest.approx(512 * 2**20, rel=1e-2)


def test_dtypes():
    def dtypes(shape, device, native=False, **config):
        config = EngineConfig(model_path="m", name="m", **config)
        return resolve_dtypes(shape, device, config, native_kernels=native)

    small = replace(QWEN_2_500M, exact_params=2**28)
    assert dtypes(small, "cpu") == ("float32", "float32")
    assert dtypes(replace(small, exact_params=2**28 + 1), "cpu") == ("bfloat16", "bfloat16")
    assert dtypes(small, "cpu", native=True) == ("bfloat16", "bfloat16")
    assert dtypes(replace(small, dtype="float16"), "cpu", native=True) == ("float32", "float32")
    assert dtypes(small, "cuda") == ("bfloat16", "bfloat16")
    assert dtypes(small, "cpu", dtype="float16", kv_dtype="float32") == ("float16", "float32")


# ---------------------------------------------------------------------------- budgets and context


def test_an_automatic_budget_is_half_of_the_memory():
    got = plan(QWEN_3_600M, 20 * GB, max_running=32)
    assert got.budget_bytes == 10 * GB
    assert 9.9 * GB < got.total_bytes <= 10 * GB


def test_an_automatic_context_is_lowered_and_said():
    got = plan(QWEN_3_600M, 20 * GB, memory_bytes=3 * GB)
    assert 256 <= got.context < 40960
    assert got.context % 16 == 0
    assert got.num_blocks * 16 >= got.context
    assert got.notes == (f"context lowered from 40960 to {got.context} tokens to fit in 3.0 GB",)
    assert got.max_concurrency < 1.01


def test_an_explicit_context_is_refused_with_what_would_fit():
    with pytest.raises(
        DoesNotFit, match=r"needs \d.* has 3\.0 GB .*a context of \d+ tokens would fit"
    ) as error:
        plan(QWEN_3_600M, 20 * GB, memory_bytes=3 * GB, context=40960)
    fits = int(str(error.value).rsplit("a context of ", 1)[1].split()[0])
    assert plan(QWEN_3_600M, 20 * GB, memory_bytes=3 * GB, context=fits).context == fits
    with pytest.raises(DoesNotFit):
        plan(QWEN_3_600M, 20 * GB, memory_bytes=3 * GB, context=fits + 16)


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(DoesNotFit, match="8193 tokens requested, but the model's limit is 8192"):
        plan(LLAMA_3_8B, 80 * GB, "cuda", context=8193)


def test_too_large_for_the_budget_names_the_budget_that_would_do():
    with pytest.raises(
        DoesNotFit, match=r"needs 16\.\d GB and has 12\.0 GB .*memory budget of 16\.\d GB"
    ) as error:
        plan(LLAMA_3_8B, 24 * GB, memory_bytes=12 * GB)
    enough = float(str(error.value).split("memory budget of ")[1].split()[0]) * GB
    assert plan(LLAMA_3_8B, 24 * GB, memory_bytes=int(enough)).context >= 256


def test_too_large_for_the_machine():
    with pytest.raises(DoesNotFit, match="a smaller model, or a machine with more memory"):
        plan(LLAMA_3_8B, 8 * GB)
    with pytest.raises(DoesNotFit, match="bfloat16 weights would fit"):
        plan(LLAMA_3_8B, 24 * GB, dtype="float32")


def test_more_than_there_is_is_lowered_and_said():
    got = plan(QWEN_3_600M, 4 * GB, memory_bytes=100 * GB)
    assert got.budget_bytes == 4 * GB
    assert got.notes[0] == "memory budget lowered from 100.0 GB to the available 4.0 GB"


def test_without_chunking_a_step_holds_a_whole_prompt():
    chunked, whole = plan(TINY, 8 * GB), plan(TINY, 8 * GB, chunked_prefill=False)
    assert whole.workspace_bytes > chunked.workspace_bytes


def test_stages_hold_their_share_of_the_tokens():
    """Of one rank each, which is as large as the same with as long a context and half of the tokens."""
    sizes = {"context": 2048, "max_running": 8, "tp": 1}
    stages = plan(TINY, 8 * GB, **sizes, pp=2, token_budget=1024)
    assert stages.step_tokens == 512
    assert stages.workspace_bytes == plan(TINY, 8 * GB, **sizes, token_budget=512).workspace_bytes


def test_steps_of_slow_machines_are_short():
    assert plan(TINY, 8 * GB).token_budget == 2048
    assert plan(QWEN_3_600M, 40 * GB).token_budget == 64
    fast = MemoryBudget(device="cpu", available=40 * GB, cores=2, core_flops=500e9)
    planned = estimate(QWEN_3_600M, fast, EngineConfig(model_path="m", name="m"))
    assert (planned.token_budget, planned.mixed_budget) == (256, 64)
    assert plan(TINY, 8 * GB, token_budget=8).max_running == 8
    assert plan(QWEN_3_600M, 40 * GB, max_running=100).token_budget == 100
    assert plan(QWEN_3_600M, 40 * GB, max_running=100).mixed_budget == 100
    assert not plan(TINY, 8 * GB, token_budget=1024).mixed_budget, "it is that of all steps"


shapes = st.builds(
    ModelShape,
    layers=st.integers(1, 80),
    hidden=st.sampled_from([64, 1024, 8192]),
    heads=st.sampled_from([4, 16, 64]),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([16, 64, 128]),
    ffn=st.sampled_from([128, 3072, 28672]),
    vocab=st.integers(10, 200_000),
    tied=st.booleans(),
    context_limit=st.integers(1, 200_000),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
configs = st.builds(
    EngineConfig,
    model_path=st.just("m"),
    name=st.just("m"),
    memory_bytes=st.one_of(st.none(), st.integers(10**8, 10**12)),
    max_running=st.one_of(st.none(), st.integers(1, 500)),
    block_size=st.sampled_from([1, 16, 32]),
    chunked_prefill=st.booleans(),
)
budgets = st.builds(
    MemoryBudget,
    device=st.sampled_from(["cpu", "cuda"]),
    available=st.integers(10**8, 10**12),
    cores=st.integers(1, 64),
)


def plan_or_none(shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> MemoryPlan | None:
    try:
        return estimate(shape, budget, config)
    except DoesNotFit:
        return None


@given(shapes, budgets, configs)
def test_never_plans_more_than_there_is(shape, budget, config):
    got = plan_or_none(shape, budget, config)
    if got is None:
        return
    assert got.total_bytes <= got.budget_bytes <= budget.available
    assert config.memory_bytes is None or got.budget_bytes <= config.memory_bytes
    assert got.num_blocks * got.block_size >= got.context >= min(shape.context_limit, 256)
    assert got.context <= shape.context_limit
    assert got.num_blocks <= got.max_running * -(-got.context // got.block_size)
    assert got.token_budget >= got.max_running


@given(shapes, budgets, configs, st.integers(0, 10**11))
def test_more_memory_never_gives_less(shape, budget, config, extra):
    # The same numbers of rows: a larger GPU may be given larger steps, which is another plan.
    config = replace(config, max_running=config.max_running or 64, token_budget=512)
    less = plan_or_none(shape, budget, config)
    more = plan_or_none(shape, replace(budget, available=budget.available + extra), config)
    if less is not None:
        assert more is not None
        assert more.context >= less.context
        assert more.context > less.context or more.num_blocks >= less.num_blocks


def whole_requests(plan):
    """Of full context, at once: parts say nothing where a context fills no whole block."""
    return plan.num_blocks // -(-plan.context // plan.block_size)


@given(shapes, budgets, configs, st.integers(1, 200_000), st.integers(1, 200_000))
def test_what_fits_a_context_fits_any_smaller_one(shape, budget, config, one, other):
    small, large = sorted((min(one, shape.context_limit), min(other, shape.context_limit)))
    got = plan_or_none(shape, budget, replace(config, context=large))
    if got is not None:
        smaller = estimate(shape, budget, replace(config, context=small))
        assert whole_requests(smaller) >= min(whole_requests(got), smaller.max_running) * 0.99


@given(st.integers(0, 10**13))
def test_sizes_shown_upwards_are_enough(count):
    text, unit = show_bytes(count, up=True).split()
    assert float(text) * {"GB": 1e9, "MB": 1e6}[unit] >= count * (1 - 1e-12)


# ---------------------------------------------------------------------------- roofline


def test_decode_is_bound_by_reading_the_weights():
    alone = decode_tokens_per_second(LLAMA_3_8B, "bfloat16", "bfloat16", 1e12)
    assert alone == pytest.approx(1e12 / (2 * (8_030_261_248 - 128_256 * 4096)))
    many = decode_tokens_per_second(LLAMA_3_8B, "bfloat16", "bfloat16", 1e12, rows=64, context=1000)
    assert 20 * alone < many < 64 * alone


def test_a_window_bounds_what_is_read():
    short, long = (
        decode_tokens_per_second(MISTRAL_7B, "bfloat16", "bfloat16", 1e12, context=n) for n in (4096, 30000)
    )
    assert short == long


def test_no_torch():
    modules = "llmbox.engine.planning.estimator, llmbox.engine.planning.performance_model"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_a_pool_of_asked_size_bounds_context_and_blocks():
    got = plan(QWEN_3_600M, 64 * GB, kv_tokens=1000)
    assert got.num_blocks == 63
    assert got.context == 1000
    with pytest.raises(DoesNotFit, match="KV cache holds 1000"):
        plan(QWEN_3_600M, 64 * GB, kv_tokens=1000, context=1001)


def test_a_large_model_may_take_more_than_half_of_a_cpu_box():
    got = plan(LLAMA_3_8B, 23 * GB)
    assert 0.5 * 23 * GB < got.total_bytes <= 0.8 * 23 * GB
    assert got.context >= 4096


# ---------------------------------------------------------------------------- quantized weights


def test_quantized_weights_are_reckoned_by_part():
    shape = replace(QWEN_3_600M, exact_params=None)
    head = shape.vocab * shape.hidden
    int8, int4 = (plan(shape, 64 * GB, quant=quant).weights_bytes for quant in ("int8", "int4"))
    assert int8 == int(shape.params * (1 + 2 / 128))
    assert int4 == int((shape.params - head) * (0.5 + 1 / 16 + 2 / 128) + head * (1 + 2 / 128))


def test_formats_of_gpus_are_reckoned_by_part():
    """w8a8 holds what int8 does; the head and what is tied to it stay wide beside blocks."""
    for shape in (replace(QWEN_3_600M, exact_params=None), LLAMA_3_8B):
        table = shape.vocab * shape.hidden
        layers = shape.params - table * (1 if shape.tied else 2)
        wide = 2 * (shape.params - layers)
        rows, int8, blocks = (
            plan(shape, 64 * GB, "cuda", quant=quant).weights_bytes for quant in ("w8a8", "int8", "fp8-block")
        )
        assert rows == int8
        assert blocks == pytest.approx(wide + layers * (1 + 4 / 128**2), rel=1e-4)


def test_a_checkpoint_of_int8_may_meet_int8_rows():
    stored = replace(QWEN_3_600M, quant="int8")
    assert plan(stored, 64 * GB, "cuda", quant="w8a8").quant == "w8a8"
    assert plan(stored, 64 * GB, "cuda", quant="auto").quant == "int8"
    with pytest.raises(DeviceError, match="holds int8 weights"):
        plan(stored, 64 * GB, "cuda", quant="fp8-block")


def test_an_unquantized_head_is_rounded_where_that_is_asked_for():
    """Plans count it; where the option does nothing, they say so."""
    awq = replace(QWEN_3_600M, quant="w4a16-g128-zp", stored="AWQ")
    kept, rounded = (plan(awq, 64 * GB, native_kernels=True, quant_head=head) for head in ("none", "int8"))
    assert (kept.quant, rounded.quant) == ("w4a16-g128-zp", "w4a16-g128-zp+int8-head")
    saved = awq.table_params * (2 - 8.125 / 8)
    assert kept.weights_bytes - rounded.weights_bytes == pytest.approx(saved, abs=16)
    assert any("output head is rounded to int8" in note for note in rounded.notes)
    assert not any("head" in note for note in kept.notes)
    unchanged = [
        plan(QWEN_3_600M, 64 * GB, native_kernels=True, quant_head="int8"),
        plan(awq, 64 * GB, "cuda", native_kernels=True, quant_head="int8"),
        plan(replace(awq, quant="fp8-dynamic"), 64 * GB, native_kernels=True, quant_head="int8"),
    ]
    assert [each.quant for each in unchanged] == ["none", "w4a16-g128-zp", "none"]
    assert all(any("--quant-head int8 changes nothing" in note for note in each.notes) for each in unchanged)
    own = plan(QWEN_3_600M, 64 * GB, quant="int4", quant_head="int8")  # its head has 8 bits anyway
    assert own == plan(QWEN_3_600M, 64 * GB, quant="int4")


def test_automatic_quantization_takes_the_first_that_fits():
    def chosen(memory):
        return plan(QWEN_3_600M, memory, quant="auto", memory_bytes=memory, context=512, kv_tokens=512).quant

    assert chosen(8 * GB) == "none"
    sizes = [
        plan(QWEN_3_600M, 64 * GB, quant=q, context=512, kv_tokens=512) for q in ("none", "int8", "int4")
    ]
    assert chosen(sizes[0].total_bytes - GB // 5) == "int8"
    assert chosen(sizes[1].total_bytes - GB // 10) == "int4"
    with pytest.raises(DoesNotFit):
        chosen(GB // 8)


def test_what_automatic_quantization_took_is_said_with_the_reason():
    def notes(memory, quant="auto"):
        return plan(QWEN_3_600M, memory, quant=quant, memory_bytes=memory, context=512, kv_tokens=512).notes

    assert notes(8 * GB) == ("quant auto took none: it fits",)
    assert notes(8 * GB, "none") == ()
    need = plan(QWEN_3_600M, 64 * GB, quant="none", context=512, kv_tokens=512).total_bytes
    (said,) = notes(need - GB // 5)
    needs, has = show_bytes(need), show_bytes(need - GB // 5)
    assert said == f"quant auto took int8, as without rounding the model needs {needs} and has {has}"


@pytest.mark.parametrize("layer_bytes", [1 << 14, 1 << 22])
def test_kept_recurrent_states_take_a_share_of_the_kv_cache(layer_bytes: int) -> None:
    layers = (True, False) * 16
    recurrent = RecurrentShape(
        is_recurrent=layers,
        has_kv=layers[::-1],
        layers=16,
        attention_layers=16,
        layer_params=1 << 20,
        layer_bytes=layer_bytes,
        divisible=(),
    )
    found = plan(replace(LLAMA_3_8B, recurrent=recurrent), 64 * GB)
    kept = (found.state_slots - found.max_running) * found.slot_bytes
    if found.state_slots > found.max_running + 24:
        assert 0.04 < kept / (found.num_blocks * found.block_size * found.kv_bytes_per_token) <= 0.05
    assert (found.state_slots > found.max_running + 24) == (layer_bytes == 1 << 14)
