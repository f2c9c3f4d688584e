"""Keys by the command line, the admin API and the official client, against a daemon with the fake engine."""

import json
import os
import re
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest

from llmbox.app.admin_client import ApiRefusal
from llmbox.app.cli.server.up import sign_in_link
from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.errors import ApiError, Exit
from llmbox.app.lifecycle.program import Program
from llmbox.app.security.key_store import KeyStore
from llmbox.app.security.keys import ApiKey, KeyChange, KeySpec
from llmbox.app.store.record import RecordFilter
from support.cli_box import PATIENCE, Box, box, until
from support.deferred_module import DeferredModule
from support.fake_engine import write_model
from support.openai_server import Server, serving
from support.tokenizers_zoo import byte_level, drawn_ids, write_text_files

openai = DeferredModule("openai")

__all__ = ["box"]

PROMPT: Any = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    tokenizer = byte_level()
    for name, options in {"alpha": {}, "beta": {}, "slow": {"step_delay": 0.03}}.items():
        write_model(write_text_files(models / name, tokenizer), **drawn_ids(tokenizer), **options)
    with serving(tmp_path_factory.mktemp("data")) as server:
        server.load(models / "alpha", "alpha", alias="first")
        server.load(models / "beta", "beta")
        server.load(models / "slow", "slow")
        yield server


@pytest.fixture(autouse=True)
def no_keys(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        keys = request.getfixturevalue("server").services.security.keys
        for key in keys.list():
            keys.remove(key.name)


def make(server: Server, name: str = "laptop", **fields: Any) -> "tuple[ApiKey, openai.OpenAI]":
    key, secret = server.services.security.keys.add(KeySpec(name=name, **fields))
    return key, server.client().with_options(api_key=secret)


def chat(client: "openai.OpenAI", **options: Any) -> Any:
    extra = {"ignore_eos": True, **options.pop("extra_body", {})}
    defaults = {"model": "alpha", "max_tokens": 4, "messages": PROMPT, "extra_body": extra}
    return client.chat.completions.create(**{**defaults, **options})


def rows(server: Server) -> list[Any]:
    server.services.request_log.flush()
    return [record for _, record in server.call(server.services.request_log.query(RecordFilter()))]


def sent(server: Server, client: "openai.OpenAI", monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The message that the engine gets."""
    messages: list[Any] = []
    real = server.services.gateway._messages
    monkeypatch.setattr(
        server.services.gateway, "_messages", lambda generation: messages.extend(real(generation)) or messages
    )
    chat(client, **options)
    monkeypatch.undo()
    return messages[0]


def test_the_official_client_with_a_key(server: Server) -> None:
    _, client = make(server)
    assert chat(client).usage.completion_tokens == 4
    server.services.security.revoke("laptop")
    with pytest.raises(openai.AuthenticationError) as caught:
        chat(client)
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_key_sees_and_uses_its_models_alone(server: Server) -> None:
    _, client = make(server, models=("fir*",))
    assert [model.id for model in client.models.list()] == ["first"]
    assert chat(client, model="first").choices
    for other in ("alpha", "beta", "does-not-exist"):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            chat(client, model=other)
        assert caught.value.code == "model_not_allowed"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(other)
    with pytest.raises(openai.PermissionDeniedError):
        client.completions.create(model="beta", prompt="a")
    assert rows(server)[0].key == "laptop"


@pytest.mark.parametrize("path", ["tokenize", "detokenize"])
def test_model_limits_hold_for_every_route_that_names_one(server: Server, path: str) -> None:
    _, client = make(server, models=("alpha",))
    body = {"model": "beta", "prompt": "a"} if path == "tokenize" else {"model": "beta", "tokens": [1]}
    with pytest.raises(openai.PermissionDeniedError):
        client.with_options(base_url=server.url).post(f"/{path}", body=body, cast_to=object)


def test_the_log_names_the_key_and_not_the_secret(server: Server) -> None:
    key, client = make(server, "phone")
    chat(client)
    row = rows(server)[0]
    assert row.key == "phone"
    assert client.api_key not in repr(row)
    assert key.digest not in repr(row)
    assert server.services.security.used.of(key.id) == pytest.approx(row.created, abs=300)
    chat(server.client())
    assert rows(server)[0].key == ""


ENDS = {
    "revoked": lambda store: store.remove("laptop"),
    "rotated": lambda store: store.rotate("laptop"),
    "by another process": lambda store: KeyStore(store._file).remove("laptop"),
}


@pytest.mark.parametrize("how", ENDS.values(), ids=ENDS)
def test_what_runs_ends_with_its_key_and_others_go_on(server: Server, how: Callable[..., Any]) -> None:
    store = server.services.security.keys
    _, client = make(server)
    _, other = make(server, "desk")
    options = {"model": "slow", "stream": True, "max_tokens": 1000}
    ends, stays = chat(client, **options), chat(other, **options)
    next(ends)
    name = next(stays).id
    how(store)
    with pytest.raises(openai.APIError) as caught:
        list(ends)
    assert caught.value.code == "invalid_api_key"
    for _ in range(5):
        next(stays)
    assert [request.id for request in server.services.gateway.in_flight()] == [name]
    stays.close()
    until(lambda: not server.services.gateway.in_flight())
    assert ("invalid_api_key", 401) in {(row.error_code, row.http_status) for row in rows(server)}


def test_an_answer_in_one_piece_ends_with_its_key_too(server: Server) -> None:
    _, client = make(server)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: chat(client, model="slow", max_tokens=1000))
        until(server.services.gateway.in_flight)
        server.services.security.keys.remove("laptop")
        with pytest.raises(openai.AuthenticationError, match="revoked"):
            answer.result(PATIENCE)


def test_quotas_are_refused_in_each_dialects_words(server: Server) -> None:
    key, client = make(server, requests_day=4, budget_month=1.0)
    secret = client.api_key
    with ThreadPoolExecutor(8) as pool:  # together they do not get more than there is
        asked = list(pool.map(lambda _: attempt(lambda: chat(client)), range(8)))
    assert [error is None for error in asked].count(True) == 4
    assert {error.code for error in asked if error} == {"insufficient_quota"}
    with pytest.raises(openai.RateLimitError) as caught:
        chat(client)
    assert caught.value.response.headers["x-should-retry"] == "false"  # official clients heed it
    assert caught.value.type == "insufficient_quota"
    assert "quota of 4 requests a day is used up. It resets at " in caught.value.message
    assert 0 < int(caught.value.response.headers["retry-after"]) <= 86_400
    anthropic = post(server, "/v1/messages", secret, {"model": "alpha", "max_tokens": 4, "messages": PROMPT})
    assert anthropic.status_code == 429
    assert anthropic.json()["error"]["type"] == "rate_limit_error"
    ollama = post(server, "/api/chat", secret, {"model": "alpha", "messages": PROMPT, "stream": False})
    assert (ollama.status_code, list(ollama.json())) == (429, ["error"])
    assert "resets at" in ollama.json()["error"]
    server.services.security.keys.change(key.name, KeyChange(requests_day=None))
    server.services.gateway.prices = ("alpha=0/1000000",)  # 1 a token
    refused = attempt(lambda: client.chat.completions.create(model="alpha", max_tokens=2, messages=PROMPT))
    assert refused is not None
    assert "budget of 1 a month has 1 left; this request reserves" in refused.message
    server.services.gateway.prices = ()
    assert chat(client).choices


def attempt(call: Callable[[], object]) -> "openai.RateLimitError | None":
    try:
        call()
    except openai.RateLimitError as error:
        return error
    return None


def post(server: Server, path: str, secret: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE)


def test_tokens_a_minute(server: Server) -> None:
    _, client = make(server, tpm=60)
    answer = client.chat.completions.with_raw_response.create(
        model="alpha", max_tokens=100, messages=PROMPT, extra_body={"ignore_eos": True}
    )
    assert answer.headers["x-ratelimit-limit-tokens"] == "60"
    assert answer.parse().usage.completion_tokens == 100  # type: ignore[union-attr]
    until(lambda: not server.services.gateway.in_flight())
    with pytest.raises(openai.RateLimitError) as caught:
        chat(client)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) > 40
    assert caught.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
    row = rows(server)[0]
    assert (row.http_status, row.key) == (429, "laptop")
    _, other = make(server, "other", tpm=1000)
    assert chat(other).choices


def test_requests_at_once_share_one_minutes_tokens(server: Server) -> None:
    _, client = make(server, tpm=500)

    def served(max_tokens: int | None) -> int:
        try:
            answer = chat(client, max_tokens=max_tokens, extra_body={"ignore_eos": True})
        except openai.RateLimitError:
            return 0
        return int(answer.usage.total_tokens)

    began = time.monotonic()
    with ThreadPoolExecutor(40) as pool:
        used = sum(pool.map(served, [200] * 40))
    assert 200 < used <= 500 + (time.monotonic() - began) * 500 / 60
    until(lambda: not server.services.gateway.in_flight())


def test_a_refused_request_gets_its_tokens_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = make(server, tpm=500)

    def refuse(*_: object) -> None:
        raise ApiError(503, "The engine is gone.", "engine_failed")

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "submit", refuse)
        with pytest.raises(openai.APIStatusError):
            chat(client, max_tokens=400)
    answer = client.chat.completions.with_raw_response.create(model="alpha", max_tokens=400, messages=PROMPT)
    used = answer.parse().usage.total_tokens  # type: ignore[union-attr]
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 500 - used


def test_the_class_of_a_request_is_in_the_log_and_the_metrics(server: Server) -> None:
    for priority, tier in ((-1, "premium"), (0, "standard"), (4, "background")):
        _, client = make(server, tier, priority=priority)
        chat(client)
        assert rows(server)[0].tier == tier
        assert f'vllm:request_success_total{{finished_reason="length",model_name="alpha",tier="{tier}"}}' in (
            server.services.metrics.render().decode()
        )


def test_requests_a_minute_also_for_streams(server: Server) -> None:
    _, client = make(server, rpm=2)
    assert len(list(chat(client, stream=True))) > 2
    assert chat(client).choices
    with pytest.raises(openai.RateLimitError):
        chat(client, stream=True)


def test_the_engine_gets_the_keys_priority_and_namespace(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, first = make(server, "one", priority=3)
    other, second = make(server, "other", priority=-3)
    asked = {"extra_body": {"priority": -9, "cache_salt": "s"}}
    assert sent(server, first, monkeypatch, **asked).priority == 3
    for unsaid in ({}, {"extra_body": {"priority": 0}}, asked):
        assert sent(server, second, monkeypatch, **unsaid).priority == -3
    assert sent(server, second, monkeypatch, extra_body={"priority": 2}).priority == 2
    assert sent(server, server.client(), monkeypatch, **asked).priority == 0
    assert sent(server, first, monkeypatch).tenant == one.id
    assert sent(server, server.client(), monkeypatch).tenant == ""
    spaces = {
        sent(server, client, monkeypatch, **more).cache_namespace
        for client in (first, second, server.client())
        for more in ({}, asked)
    }
    assert len(spaces) == 6
    assert {f"{one.id}/", f"{other.id}/", ""} <= spaces


# ---------------------------------------------------------------------- the command line and a daemon


def ask(url: str, secret: str = "", **headers: str) -> int:
    if secret:
        headers["Authorization"] = f"Bearer {secret}"
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_beyond_this_machine_only_with_a_key(box: Box) -> None:
    model = box.model()
    refused = box.run("serve", model, "--host", "0.0.0.0")
    assert refused.code == Exit.DENIED
    assert "llmbox key add" in refused.err
    made = box.run("key", "add", "laptop")
    assert made.code == 0
    secret = made.out.strip()
    assert secret.startswith("sk-llmbox-")
    assert made.out == secret + "\n", "alone on stdout"
    assert secret not in made.err
    box.serve(model, "--host", "0.0.0.0")
    running = box.running
    assert running is not None
    url = running.url
    assert "127.0.0.1" in url
    advice = box.run("up").out
    assert '-H "Authorization: Bearer $LLMBOX_API_KEY"' in advice
    shown = re.search(r"^  (curl .*\n.*)$", advice, re.MULTILINE)
    assert shown is not None
    environ = os.environ | {"LLMBOX_API_KEY": secret}
    subprocess.run(["bash", "-c", shown[1].replace("curl ", "curl -fsS ")], env=environ, check=True)
    assert ask(f"{url}/health") == 200
    for path in ("/v1/models", "/ready", "/metrics", "/version", "/openapi.json", "/admin/api/status"):
        assert ask(url + path) == 401, path
    assert ask(f"{url}/v1/models", secret) == 200
    assert ask(f"{url}/metrics", secret) == 403
    assert ask(f"{url}/admin/api/status", secret) == 403
    assert ask(f"{url}/v1/models", secret, Host="evil.example") == 421
    rotated = box.run("key", "rotate", "laptop").out.strip()
    assert ask(f"{url}/v1/models", secret) == 401
    assert ask(f"{url}/v1/models", rotated) == 200
    assert box.run("key", "rm", "laptop", "--yes").code == 0
    assert ask(f"{url}/v1/models", rotated) == 401
    assert box.api("status")["host"] == "0.0.0.0", "the unix socket needs no key"
    log = box.paths.log_file.read_text()
    assert secret not in log
    assert rotated not in log


def test_keys_by_the_admin_api_and_a_sign_in_link(box: Box) -> None:
    box.serve(box.model())
    client = box.client
    made = client.post("/admin/api/keys", {"name": "phone", "scopes": ["admin"], "rpm": 9})
    secret = made["secret"]
    assert made["key"]["display"] in secret + "…" or secret.startswith(made["key"]["display"][:-1])
    assert "digest" not in json.dumps(made)
    listed = client.get("/admin/api/keys")["keys"]
    assert [(key["name"], key["rpm"], key["last_used"]) for key in listed] == [("phone", 9, None)]
    assert secret not in json.dumps(listed)
    running = box.running
    assert running is not None
    assert ask(f"{running.url}/admin/api/status", secret) == 200
    assert client.get("/admin/api/keys")["keys"][0]["last_used"] is not None
    for body, status in [
        ({"name": "phone"}, 409),
        ({"name": "a b"}, 400),
        ({"name": "x", "unknown": 1}, 400),
        ({"name": "x", "scopes": []}, 400),
        ({}, 400),
    ]:
        with pytest.raises(ApiRefusal) as caught:
            client.post("/admin/api/keys", body)
        assert caught.value.status == status, body
    fresh = client.post("/admin/api/keys/phone/rotate", {})["secret"]
    assert ask(f"{running.url}/admin/api/status", secret) == 401
    assert ask(f"{running.url}/admin/api/status", fresh) == 200
    assert box.run("key", "ls", "-q").out == "phone\n"
    assert box.run("key", "ls", "--json").json["keys"][0]["name"] == "phone"
    assert f"{running.url}/admin/signin?token=" in box.run("up").out
    link = sign_in_link(Program(data_dir=box.paths.data_dir))
    assert link.startswith(f"{running.url}/admin/signin?token=")
    assert ask(link) == 200
    with pytest.raises(ApiRefusal) as caught:
        client.post("/admin/api/keys/nobody/rotate", {})
    assert caught.value.status == 404
    assert stat.S_IMODE(box.paths.keys_file.stat().st_mode) == 0o600


def test_serve_prints_the_api_and_a_link_and_logs_no_secret(box: Box) -> None:
    child = box.serve(box.model())
    assert child.stdout is not None
    api, link = child.stdout.readline().strip(), child.stdout.readline().strip()
    assert api.endswith("/v1")
    token = link.partition("/admin/signin?token=")[2]
    assert len(token) == 43
    assert ask(link) == 200
    assert token not in box.paths.log_file.read_text()


def test_require_key_on_this_machine_whatever_happened_to_the_request_log(box: Box) -> None:
    secret = box.run("key", "add", "laptop", "--expires", "1h", "--model", "tiny").out.strip()
    box.paths.request_db.write_bytes(b"no database" * 1000)
    box.serve(box.model(), LLMBOX_SERVER_REQUIRE_KEY="true")
    running = box.running
    assert running is not None
    assert ask(f"{running.url}/v1/models") == 401
    assert ask(f"{running.url}/v1/models", "none") == 401
    assert ask(f"{running.url}/v1/models", secret) == 200


def test_mistakes_on_the_command_line(box: Box) -> None:
    for arguments, code in [
        (["add", "a b"], Exit.USAGE),
        (["add", "x", "--scope", "root"], Exit.USAGE),
        (["add", "x", "--expires", "yesterday"], Exit.USAGE),
        (["add", "x", "--expires", "2001-01-01"], Exit.USAGE),
        (["add", "x", "--rpm", "0"], Exit.USAGE),
        (["rm", "nobody", "--yes"], Exit.NOT_FOUND),
        (["rotate", "nobody"], Exit.NOT_FOUND),
    ]:
        done = box.run("key", *arguments)
        assert done.code == code, (arguments, done.err)
        assert done.out == ""
    assert not box.paths.keys_file.exists()
    box.paths.keys_file.write_text("{")
    broken = box.run("key", "ls")
    assert broken.code == Exit.FAILED
    assert str(box.paths.keys_file) in broken.err
    assert box.run("serve", box.model()).code == Exit.FAILED


def test_a_file_that_may_not_grow_keeps_the_old_keys(box: Box) -> None:
    """The kernel refuses the write halfway, as on a full disk."""
    secret = box.run("key", "add", "laptop").out.strip()
    before = box.paths.keys_file.read_bytes()
    limit = len(before) + 20
    limited = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2);"
    done = subprocess.run(
        [
            *(sys.executable, "-S", "-c", limited + "os.execv(sys.argv[2], sys.argv[2:])", str(limit)),
            *box.command("key", "add", "other", "--model", "x" * 150),
        ],
        env=box.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == Exit.FAILED
    assert "cannot write the key file" in done.stderr
    assert done.stdout == ""
    assert box.paths.keys_file.read_bytes() == before
    assert secret not in done.stderr
