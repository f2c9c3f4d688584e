"""Predictions for GPUs that are not here, and plans for users: arithmetic, and what it grows with."""

from dataclasses import replace
from typing import Any

import pytest

from llmbox.app.fit.capacity import CapacityPlan, UserLoad, capacity_rows, plan_capacity, wait_warning
from llmbox.app.fit.fit import SUSTAINED
from llmbox.app.fit.gpu_prediction import GpuPrediction, RequestSize, predict
from llmbox.app.fit.report import prediction_rows
from llmbox.app.hub.model_info import parse_config_files
from llmbox.app.models.registry import recommended
from llmbox.engine.config import EngineConfig
from llmbox.engine.hardware.gpus import GPU_MODELS

CONFIGS = {model.repo: parse_config_files({"config.json": model.config}) for model in recommended()}
QWEN = CONFIGS["Qwen/Qwen3-8B"]
LOAD = RequestSize(1024, 256)
H100 = GPU_MODELS["h100"]


def predicted(
    gpu: Any = H100, config: Any = QWEN, *, load: RequestSize | None = LOAD, **options: Any
) -> GpuPrediction:
    price = options.pop("price", None)
    return predict(config, gpu, EngineConfig(model_path="", name="", **options), load=load, price=price)


def planned(found: GpuPrediction, **load: Any) -> CapacityPlan:
    return plan_capacity(found, UserLoad(**{"users": 1000, "per_minute": 1.0, "request": LOAD, **load}))


def test_memory_and_speed_are_those_of_the_data_sheet():
    found = predicted()
    assert found.plan is not None
    assert found.speed is not None
    weights = QWEN.num_parameters * 2
    assert found.plan.weights_bytes == pytest.approx(weights, rel=0.01)
    assert found.plan.total_bytes <= found.budget == int(80 * 2**30 * 0.9)
    read = weights - QWEN.vocab_size * QWEN.hidden_size * 2 + (1024 + 128) * found.plan.kv_bytes_per_token
    assert found.speed.one_stream == pytest.approx(SUSTAINED * 3.35e12 / read, rel=0.01)
    linears = 2 * (QWEN.num_parameters - 2 * QWEN.vocab_size * QWEN.hidden_size)
    assert found.speed.prompt == pytest.approx(SUSTAINED * 989e12 / linears, rel=0.05)  # and attention
    assert found.speed.first_token == pytest.approx(1024 / found.speed.prompt)


def test_prices_are_the_card_by_its_tokens():
    found = predicted(price=3.6)
    assert found.speed is not None
    assert found.speed.output_price == pytest.approx(1e6 * 0.001 / found.speed.all_streams)
    assert found.speed.prompt_price == pytest.approx(1e6 * 0.001 / found.speed.prompt)
    two = predicted(price=3.6, tp=2)
    assert two.speed is not None
    assert two.cards == 2
    assert two.speed.output_price == pytest.approx(2e3 / two.speed.all_streams)
    assert predicted().speed.output_price is None


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("Qwen/Qwen3-8B", 1),
        ("Qwen/Qwen3-8B", 2),
        ("Qwen/Qwen3-30B-A3B", 1),
        ("Qwen/Qwen3-30B-A3B", 2),
        ("google/gemma-3-1b-it", 1),
    ],
)
def test_faster_hardware_is_never_slower(name: str, tp: int):
    found = predicted(GPU_MODELS["h200"], CONFIGS[name], tp=tp).speed
    for better in (
        {"gigabytes_per_second": 9600},
        {"float16": 2000.0},
        {"gigabytes_per_second": 9600, "float16": 2000.0},
    ):
        more = predicted(replace(GPU_MODELS["h200"], **better), CONFIGS[name], tp=tp).speed
        for rate in ("one_stream", "all_streams", "prompt"):
            assert getattr(more, rate) >= getattr(found, rate)
        assert more.first_token <= found.first_token
    assert more.one_stream > found.one_stream
    assert more.prompt > found.prompt


def test_formats_use_the_rates_of_their_products():
    plain, float8 = predicted().speed, predicted(quant="fp8").speed
    assert float8.one_stream > 1.5 * plain.one_stream
    assert float8.prompt > 1.5 * plain.prompt
    widened = predicted(quant="int8").speed
    assert widened.one_stream > 1.5 * plain.one_stream
    assert widened.prompt == pytest.approx(plain.prompt, rel=0.01)
    assert "8.9" in predicted(GPU_MODELS["rtx3090"], quant="fp8").reason


def test_a_card_that_is_too_small_names_what_would_do():
    found = predicted(GPU_MODELS["rtx4080"])
    assert not found.fits
    assert found.speed is None
    assert any(remedy.startswith("--quant int8: ") for remedy in found.remedies)
    assert any(remedy.startswith("--tp 2: ") for remedy in found.remedies)
    assert "why" in prediction_rows(found)
    assert predicted(GPU_MODELS["rtx4080"], tp=2).cards == 2


def test_requests_longer_than_the_context_are_refused_and_the_usual_ones_shortened():
    refused = predicted(load=RequestSize(100_000, 1))
    assert not refused.fits
    assert "context of 40960 tokens" in refused.reason
    assert "try --quant int8" not in refused.reason
    assert "try --quant int8" in predicted(GPU_MODELS["rtx4090"], load=RequestSize(35_000, 1)).reason
    short = predicted(load=None, context=512)
    assert short.speed is not None
    assert short.speed.load == RequestSize(410, 102)


def test_models_that_write_nothing_have_a_plan_and_no_speed():
    found = predicted(config=CONFIGS["sentence-transformers/all-MiniLM-L6-v2"], load=None)
    assert (found.speed, found.times) == (None, None)
    assert found.fits


def test_the_arithmetic_of_users():
    found = predicted(price=2.0)
    plan = planned(found)
    assert found.plan is not None
    assert plan.kv_per_user == 1280 * found.plan.kv_bytes_per_token
    assert plan.requests_held == found.plan.num_blocks * 16 // 1280
    assert plan.streams == plan.streams_in_memory == found.plan.max_running
    assert plan.engine_per_second == pytest.approx(plan.streams / (256 * plan.tpot))
    assert plan.cards == plan.engines == -(-1000 // int(60 * plan.engine_per_second))
    served = 1000 / 60 * 3600 * 1280 / 1e6
    assert plan.hourly == 2.0 * plan.cards
    assert plan.token_price == pytest.approx(plan.hourly / served)
    assert plan.output_price == pytest.approx(5 * plan.token_price)
    shown = dict(capacity_rows(found, plan))
    assert f"{1280 * 147456 / 1e6:.1f} MB" in shown["KV a user"]
    assert "1000 users x 1 a minute = 16.67 requests/s" in shown["load"]


def test_layers_with_a_window_keep_no_more_of_a_long_request():
    found = predicted(config=CONFIGS["google/gemma-3-1b-it"])
    assert found.plan is not None
    short, long = (planned(found, request=RequestSize(prompt, 16)) for prompt in (112, 16_368))
    each = found.plan.kv_bytes_per_token
    assert short.kv_per_user == 128 * (each + found.plan.window_bytes_per_token)
    kept = found.plan.running_window_blocks * found.plan.block_size
    assert found.plan.window <= kept < 2 * found.plan.window
    assert long.kv_per_user == 16_384 * each + kept * found.plan.window_bytes_per_token
    assert planned(found).streams == found.plan.max_running


@pytest.mark.parametrize("name", ["rtx4090", "h100"])
@pytest.mark.parametrize("target", [None, 0.04])
def test_more_users_never_need_fewer_cards(name: str, target: float | None):
    found = predicted(GPU_MODELS[name])
    cards = [planned(found, users=users, tpot_target=target).cards for users in range(1, 20_000, 371)]
    assert cards == sorted(cards)
    assert cards[0] == 1 < cards[-1]
    rates = [planned(found, per_minute=rate, tpot_target=target).cards for rate in (0.1, 1, 3, 10, 100)]
    assert rates == sorted(rates)


def test_a_stricter_target_never_needs_fewer_cards_and_is_kept():
    found = predicted()
    plans = [planned(found, tpot_target=target) for target in (1.0, 0.05, 0.03, 0.02, 0.014)]
    assert [plan.cards for plan in plans] == sorted(plan.cards for plan in plans)
    assert [plan.streams for plan in plans] == sorted((plan.streams for plan in plans), reverse=True)
    for plan in plans:
        assert plan.tpot <= plan.load.tpot_target
    assert plans[0].streams == plans[0].streams_in_memory


def test_a_target_that_one_stream_misses_has_no_plan():
    plan = planned(predicted(price=2.0), tpot_target=0.001)
    assert not plan.is_within_target
    assert (plan.streams, plan.cards, plan.hourly, plan.token_price) == (0, 0, None, None)
    assert "beyond the target" in dict(capacity_rows(predicted(), plan))["engines"]


def test_ranks_are_counted_as_cards():
    found = predicted(tp=2)
    plan = planned(found, users=10_000)
    assert plan.cards == 2 * plan.engines
    assert plan.step_cost.exchange > 0
    assert "on each of 2 cards" in dict(capacity_rows(found, plan))["KV a user"]


def test_users_who_cannot_ask_so_often_are_told():
    found = predicted()
    assert wait_warning(planned(found)) == ""
    assert "cannot ask 60 times a minute" in wait_warning(planned(found, per_minute=60.0))
