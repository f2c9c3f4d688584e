import json
from pathlib import Path

from llmbox.app.engines.loaded_model import ModelReadiness
from llmbox.app.http.server.request import is_local_socket
from llmbox.app.security.keys import KeySpec
from support.http_app import client, fake_services, guarded, make_app

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_index_says_what_runs_here() -> None:
    async with client(make_app()) as http:
        answer = await http.get("/", headers=BROWSER)
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["vary"] == "Accept"  # a cache must not give a program the page
    for there in ('href="/admin"', "/v1", "/api", "/openapi.json"):
        assert there in answer.text


async def test_an_address_that_the_panel_does_not_have_is_a_page_for_browsers_only() -> None:
    async with client(make_app()) as http:
        page = await http.get("/admin/nosuch", headers=BROWSER)
        program = await http.get("/admin/nosuch")
        api = await http.get("/admin/api/nosuch", headers=BROWSER)
        other = await http.get("/v1/nosuch", headers=BROWSER)
    assert page.status_code == program.status_code == api.status_code == other.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert 'href="/admin"' in page.text
    for answer in (program, api, other):
        assert answer.json()["error"]["code"] == "not_found"


async def test_programs_are_told_what_ollamas_clients_look_for() -> None:
    async with client(make_app()) as http:
        answer, head = await http.get("/"), await http.head("/")
    assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert (head.status_code, head.content) == (200, b"")


async def test_readiness_names_its_cause() -> None:
    services = fake_services()
    async with client(make_app(services=services)) as http:
        empty = {"status": "ready", "cause": "no model is loaded", "models": []}
        assert (await http.get("/ready")).json() == empty
        services.engines.state = (False, "builtin is loading")
        services.engines.models = [ModelReadiness("builtin", "loading", "builtin is loading")]
        answer = await http.get("/ready")
    assert answer.status_code == 503
    assert answer.json() == {
        "status": "not_ready",
        "cause": "builtin is loading",
        "models": [{"name": "builtin", "state": "loading", "cause": "builtin is loading"}],
    }
    assert answer.headers["retry-after"] == "1"


async def test_readiness_names_only_models_that_the_key_may_use(tmp_path: Path) -> None:
    services = guarded(tmp_path, require_key=True)
    services.engines.state = (True, "secret could not be loaded: no file")
    services.engines.models = [
        ModelReadiness("secret", "failed", "secret could not be loaded: no file"),
        ModelReadiness("open", "ready", ""),
    ]
    _, limited = services.security.keys.add(KeySpec(name="limited", models=("open",)))
    _, free = services.security.keys.add(KeySpec(name="free"))
    async with client(make_app(services=services)) as http:
        seen = {
            secret: (await http.get("/ready", headers={"authorization": f"Bearer {secret}"})).json()
            for secret in (limited, free)
        }
    assert seen[limited] == {
        "status": "ready",
        "cause": "",
        "models": [{"name": "open", "state": "ready", "cause": ""}],
    }
    assert seen[free]["cause"] == "secret could not be loaded: no file"
    assert [model["name"] for model in seen[free]["models"]] == ["secret", "open"]


async def test_readiness_shows_folders_to_admins_only(tmp_path: Path) -> None:
    cause = "m could not be loaded: /srv/models/m/config.json is not JSON"
    services = guarded(tmp_path, require_key=True)
    services.engines.state = (False, cause)
    services.engines.models = [ModelReadiness("m", "failed", cause)]
    _, user = services.security.keys.add(KeySpec(name="user"))
    _, admin = services.security.keys.add(KeySpec(name="admin", scopes=("admin",)))
    async with client(make_app(services=services)) as http:
        seen = {
            secret: (await http.get("/ready", headers={"authorization": f"Bearer {secret}"})).json()
            for secret in (user, admin)
        }
    for secret, said in ((user, "m could not be loaded: config.json is not JSON"), (admin, cause)):
        assert (seen[secret]["cause"], seen[secret]["models"][0]["cause"]) == (said, said)


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
