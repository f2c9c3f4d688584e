from prometheus_client.parser import text_string_to_metric_families

from llmbox.app.metrics import EngineReading, Metrics
from llmbox.app.store import RequestRecord
from llmbox.engine.ipc.messages import DraftCounts, EngineStats


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, s.labels.get("model_name", "")): s.value for f in families for s in f.samples}


def test_engine_gauges_are_read_at_scrape_time():
    stats = EngineStats(
        running=3, waiting=2, blocks_total=10, blocks_used=4, prefix_queries=100, prefix_hits=60,
        drafts=4, draft_tokens=9, accepted_tokens=5,
        host_hits=16, host_saved_bytes=9000, host_loaded_bytes=4000, host_skipped=1,
        draft_methods={"suffix": DraftCounts(drafts=3, draft_tokens=7, accepted_tokens=4)},
    )  # fmt: skip
    metrics = Metrics(lambda: [EngineReading("m", stats, restarts=1, resumed=7, ready=True)], lambda: 5)
    got = samples(metrics)
    assert got["vllm:num_requests_running", "m"] == 3
    assert got["vllm:kv_cache_usage_perc", "m"] == 0.4
    assert got["vllm:prefix_cache_hits_total", "m"] == 60
    host = [
        got[f"llmbox_kv_host_{each}_total", "m"]
        for each in ("hits", "saved_bytes", "loaded_bytes", "skipped")
    ]
    assert host == [16, 9000, 4000, 1]
    assert got["vllm:spec_decode_num_drafts_total", "m"] == 4
    assert got["vllm:spec_decode_num_draft_tokens_total", "m"] == 9
    assert got["vllm:spec_decode_num_accepted_tokens_total", "m"] == 5
    assert got["llmbox_requests_resumed_total", "m"] == 7
    text = metrics.render().decode()
    for name, value in (("drafts", 3), ("draft_tokens", 7), ("accepted_tokens", 4)):
        labels = 'method="suffix",model_name="m"'
        assert f"llmbox_spec_decode_num_{name}_total{{{labels}}} {value}.0" in text
    assert got["llmbox_request_log_dropped_total", ""] == 5


def test_balance_is_told_of_mixtures_alone():
    mixture = EngineStats(expert_rows=900, expert_imbalance=1.75, expert_rank_imbalance=1.25)
    engines = {"dense": EngineStats(steps=3), "alone": EngineStats(expert_imbalance=1.5), "moe": mixture}
    readings = [
        EngineReading(name, each, restarts=0, resumed=0, ready=True) for name, each in engines.items()
    ]
    got = samples(Metrics(lambda: readings, lambda: 0))
    imbalances = {key: value for key, value in got.items() if key[0].startswith("llmbox_expert_")}
    assert imbalances["llmbox_expert_rows_total", "moe"] == 900
    assert {key: value for key, value in imbalances.items() if "imbalance" in key[0]} == {
        ("llmbox_expert_imbalance", "alone"): 1.5,
        ("llmbox_expert_imbalance", "moe"): 1.75,
        ("llmbox_expert_rank_imbalance", "moe"): 1.25,
    }


def test_a_request_fills_its_histograms():
    metrics = Metrics()
    metrics.record_request(
        RequestRecord(
            id="r", created=0, model="m", endpoint="chat", http_status=200, finish_reasons="stop,length",
            queue_s=0.01, ttft_s=0.09, tpot_s=0.02, e2e_s=1.05, tier="premium",
        ),
        waited=0.05,
    )  # fmt: skip
    metrics.inter_token_observer("m", "premium")(0.02)
    metrics.record_refusal("queue_full")
    got = samples(metrics)
    assert got["vllm:time_to_first_token_seconds_count", "m"] == 1
    assert got["vllm:time_to_first_token_seconds_sum", "m"] == 0.09
    assert round(got["vllm:request_prefill_time_seconds_sum", "m"], 6) == 0.03
    assert round(got["vllm:request_decode_time_seconds_sum", "m"], 6) == 0.96
    assert got["vllm:inter_token_latency_seconds_count", "m"] == 1
    assert 'finished_reason="length"' in metrics.render().decode()
    labels = 'model_name="m",tier="premium"'
    assert f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0" in metrics.render().decode()


def test_a_request_without_a_first_token_leaves_latencies_alone():
    metrics = Metrics()
    metrics.record_request(
        RequestRecord(id="r", created=0, model="m", endpoint="chat", http_status=200, finish_reasons="abort"),
        waited=0.0,
    )
    assert ("vllm:time_to_first_token_seconds_count", "m") not in samples(metrics)
