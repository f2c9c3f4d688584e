import pytest

from llmbox.app.telemetry.snapshot import EngineSnapshot, GpuReading, Gpus, Host, Tick, find_alerts


def texts(**fields) -> list[str]:
    return [f"{each.level}: {each.text}" for each in find_alerts(Tick(time=0.0, **fields))]


def test_all_well_is_silence():
    assert texts(engines=(EngineSnapshot(model="m", state="ready"),), host=Host(disk_free=1e12)) == []


def test_a_failure_outranks_progress():
    found = texts(
        ready=False,
        cause="b is loading (weights 40 %)",
        engines=(
            EngineSnapshot(model="a", state="failed", cause="killed by the kernel: out of memory"),
            EngineSnapshot(model="b", state="loading"),
        ),
        host=Host(disk_free=5e8),
    )
    assert found == [
        "failure: a: killed by the kernel: out of memory",
        "warning: disk: 500 MB free",
    ]


def test_a_failed_load_is_named_while_other_models_answer():
    cause = "broken could not be loaded: no config.json"
    found = texts(ready=True, cause=cause, engines=(EngineSnapshot(model="a", state="ready"),))
    assert found == [f"failure: {cause}"]


def test_gpus():
    found = texts(
        gpus=Gpus(
            devices=(
                GpuReading(index=0, name="a", throttle=("power cap", "thermal")),
                GpuReading(index=1, name="b", temperature=93.0),
                GpuReading(index=2, name="c", problem="GPU is lost"),
                GpuReading(index=3, name="d", throttle=("power cap",)),
            )
        )
    )
    assert found == [
        "failure: GPU 2: GPU is lost",
        "warning: GPU 0: clocks throttled (thermal)",
        "warning: GPU 1: 93 °C",
    ]


@pytest.mark.parametrize(("temperature", "warned"), [(89.9, False), (90.0, True)])
def test_a_gpu_is_hot_from_90_degrees_on(temperature, warned):
    gpus = Gpus(devices=(GpuReading(index=0, name="a", temperature=temperature),))
    assert texts(gpus=gpus) == (["warning: GPU 0: 90 °C"] if warned else [])


def test_a_full_cache_with_a_queue():
    engine = EngineSnapshot(model="m", state="ready", blocks_total=100, blocks_live=99, waiting=4)
    assert texts(engines=(engine,)) == ["warning: m: KV cache full, 4 waiting"]


def test_kernels_that_are_not_the_fast_ones():
    def told(**facts) -> list[tuple[str, str]]:
        engine = EngineSnapshot(model="m", state="ready", device="cpu", **facts)
        return [(each.text, each.fix) for each in find_alerts(Tick(time=0.0, engines=(engine,)))]

    slow = "m: PyTorch's slower kernels (onednn) run"
    assert told(kernels="onednn", dtype="bfloat16") == [(slow, "llmbox doctor")]
    assert told(kernels="onednn", dtype="float16") == [(slow, "load it with --dtype bfloat16")]
    assert told(kernels="cpu avx2", dtype="bfloat16") == []
    assert told(kernels="cpu amx, int8 weights", dtype="bfloat16") == []


def test_targets_that_no_request_can_meet():
    engine = EngineSnapshot(model="m", state="ready", target_problem="too slow")
    told = find_alerts(Tick(time=0.0, engines=(engine,)))
    assert [(each.level, each.text) for each in told] == [("warning", "m: too slow")]
    assert "llmbox bench m --find" in told[0].fix
