import json

from llmbox.app.http.request import is_local_socket
from support.http_app import client, fake_services, make_app


async def test_index_says_what_runs_here() -> None:
    async with client(make_app()) as http:
        answer = await http.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert answer.headers["content-type"].startswith("text/plain")
    assert "llmbox" in answer.text
    assert "/v1" in answer.text


async def test_programs_are_told_what_ollamas_clients_look_for() -> None:
    async with client(make_app()) as http:
        answer, head = await http.get("/"), await http.head("/")
    assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert (head.status_code, head.content) == (200, b"")


async def test_readiness_names_its_cause() -> None:
    services = fake_services()
    async with client(make_app(services=services)) as http:
        assert (await http.get("/ready")).json() == {"status": "ready", "cause": ""}
        services.engines.state = (False, "builtin: loading")
        answer = await http.get("/ready")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not_ready", "cause": "builtin: loading"}
    assert answer.headers["retry-after"] == "1"


async def test_health_version_metrics() -> None:
    async with client(make_app()) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert (await http.get("/version")).json()["version"] == "0.0.0"
        metrics = await http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "vllm:" in metrics.text


async def test_openapi_lists_routes_and_error_answers() -> None:
    async with client(make_app()) as http:
        document = json.loads((await http.get("/openapi.json")).content)
    assert document["openapi"].startswith("3.1")
    for path in ("/", "/health", "/ready", "/metrics", "/version"):
        responses = document["paths"][path]["get"]["responses"]
        assert {"200", "403", "404", "421", "500"} <= set(responses)
    error = document["components"]["schemas"]["Error"]["properties"]["error"]
    assert error["required"] == ["message", "type", "param", "code"]


def test_only_the_server_marks_local_connections() -> None:
    assert is_local_socket({"type": "http", "extensions": {"llmbox.local": {}}})  # type: ignore[arg-type]
    assert not is_local_socket({"type": "http", "extensions": {}})  # type: ignore[arg-type]
    assert not is_local_socket({"type": "http"})  # type: ignore[arg-type]
