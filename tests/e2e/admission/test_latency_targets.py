"""Requests refused by latency targets, in every dialect; the fake engine says how long its steps take."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest

from llmbox.app.security.security import BACKGROUND_PRIORITY
from support.cli_box import PATIENCE, until
from support.fake_engine import GO_FILE, write_model
from support.openai_server import serving
from support.tokenizers_zoo import CHATML, byte_level, drawn_ids, write_text_files

STEP = 0.05
CHAT = {"model": "one", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
def server(tmp_path):
    tokenizer = byte_level()
    folder = write_text_files(tmp_path / "one", tokenizer, CHATML)
    write_model(folder, **drawn_ids(tokenizer), max_running=1, step_seconds=STEP, hold_at=3)
    with serving(tmp_path / "data") as server:
        server.load(folder, "one")
        server.go = folder / GO_FILE
        yield server


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        server.go.touch()
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200  # measures the steps
        server.go.unlink()
        yield http


def aim(server, *targets: str, admission: str = "slo") -> None:
    """As a reload does."""

    async def apply() -> None:
        settings = server.services.settings
        limits, usage = (
            replace(settings.limits, admission=admission),
            replace(settings.usage, targets=targets),
        )
        server.services.gateway.admission.apply(replace(settings, limits=limits, usage=usage))

    server.call(apply())


@contextmanager
def busy(server, http):
    """A stream that holds the only place. Leaving lets it end."""
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield
        server.go.touch()
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_a_request_that_would_be_late_is_refused_in_its_dialect(server, http):
    aim(server, "o*=100/1000")
    with busy(server, http):
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "latency_target_missed")
        assert "its first token after" in error["message"]
        assert "(target 100 ms)" in error["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        told = http.post("/v1/messages", json=CHAT)
        assert told.status_code == 429
        assert told.json()["error"]["type"] == "rate_limit_error"
        assert "first token" in told.json()["error"]["message"]
        ollama = http.post("/api/chat", json={k: CHAT[k] for k in ("model", "messages")})
        assert ollama.status_code == 429
        assert "first token" in ollama.json()["error"]
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    text = http.get("/metrics").text
    told = 'llmbox_admission_total{model_name="one",outcome="%s",tier="standard"} %s'
    assert told % ("refused", "3.0") in text
    assert told % ("admitted", "2.0") in text
    assert 'llmbox_ttft_forecast_error_seconds_count{model_name="one",tier="standard"} 2.0' in text
    assert 'llmbox_engine_prefill_steps_total{model_name="one"}' in text


@pytest.mark.parametrize(
    ("targets", "admission"), [(("other=1/1",), "slo"), ((), "slo"), (("one=1/1",), "queue")]
)
def test_without_targets_the_queue_decides(server, http, targets, admission):
    aim(server, *targets, admission=admission)
    with busy(server, http), http.stream("POST", "/v1/completions", json=COMPLETION) as waits:
        assert waits.status_code == 200
        server.go.touch()


COMPLETION = {"model": "one", "prompt": "hello", "max_tokens": 2, "stream": True}


def test_targets_that_cannot_be_met_are_served_one_by_one(server, http, caplog):
    aim(server, "one=0.001/0.001")
    with busy(server, http):
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 429
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    queue = server.services.engines.get("one").supervisor.queue
    assert "cannot be met" in queue.never_met
    assert "its first token came after" in queue.never_met
    assert (queue.counts.admitted, queue.counts.refused, queue.counts.missed) == (2, 1, 2)
    warnings = [each for each in caplog.messages if "cannot be met" in each]
    assert len(warnings) == 1
    assert warnings[0].startswith("one: ")
    aim(server, "one=100000/100000")
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    assert queue.never_met == ""


def test_a_batch_has_no_target_for_its_first_token(server, http):
    """Nobody waits for it."""
    aim(server, "one=100/1000")
    generous = {"model": "one", "prompt": "hello", "max_tokens": 2, "priority": BACKGROUND_PRIORITY}
    with (
        busy(server, http),
        http.stream("POST", "/v1/completions", json=generous | {"stream": True}) as waits,
    ):
        assert waits.status_code == 200
        server.go.touch()


def test_embeddings_have_no_targets(server, http):
    aim(server, "one=1/1")
    with ThreadPoolExecutor(1) as threads, busy(server, http):
        asked = threads.submit(http.post, "/v1/embeddings", json={"model": "one", "input": "a"})
        until(lambda: server.services.gateway.open_count == 2)
        server.go.touch()
        assert asked.result().status_code == 200
