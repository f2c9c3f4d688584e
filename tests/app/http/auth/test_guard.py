"""Nothing is served unless its route says to whom."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import Controller, get, post
from litestar.routes import HTTPRoute

from llmbox.app.http.admin import admin_router
from llmbox.app.http.app import App
from llmbox.app.http.auth.guard import Access, default_deny
from llmbox.app.http.common_routes import memory_router
from llmbox.app.http.ollama import ollama_router
from llmbox.app.http.openai import openai_router
from llmbox.ui.web import panel_routes
from support.http_app import client, fake_services, guarded, make_app, over_unix


@get("/forgotten")
async def forgotten() -> str:
    return "open"


class Admin(Controller):
    path = "/admin/api"
    opt = {"access": Access.ADMIN}  # noqa: RUF012 - Litestar reads it so

    @get("/status")
    async def status(self) -> str:
        return "state"


@post("/infer", opt={"access": Access.INFER}, status_code=200)
async def infer() -> str:
    return "tokens"


HANDLERS = [forgotten, Admin, infer]


def handlers_of(app: App) -> list[Any]:
    routes = [route for route in app.routes if isinstance(route, HTTPRoute)]
    return [
        handler for route in routes for handler in route.route_handlers if handler.http_methods != {"OPTIONS"}
    ]


def test_the_guard_stands_before_every_route() -> None:
    app = make_app(HANDLERS)
    assert len(handlers_of(app)) >= 9
    for handler in handlers_of(app):
        names = [getattr(guard, "func", guard) for guard in handler.resolve_guards()]
        assert default_deny in names, handler


OURS = [openai_router, ollama_router, memory_router, admin_router, *panel_routes]
CHANGES = {
    ("/api/pull", "POST"),
    ("/api/delete", "DELETE"),
    ("/api/copy", "POST"),
    ("/api/create", "POST"),
    ("/v1/load", "POST"),
    ("/v1/unload", "POST"),
    ("/v1/models/{model_id}", "DELETE"),
}
"""They change the box, and stand where the clients of an API look for them."""
OPEN = {
    ("/", "GET"),
    ("/health", "GET"),
    ("/ping", "GET"),
    ("/ping", "POST"),
    ("/admin/signin", "GET"),
    ("/admin/signin", "POST"),
    ("/admin/static/{name}", "GET"),
}
"""Liveness, and the way in. Files of the panel are open too, and hold no data."""


def paths_of(app: App) -> list[tuple[str, str]]:
    routes = [route for route in app.routes if isinstance(route, HTTPRoute)]
    return [(route.path_format, method) for route in routes for method in sorted(route.methods)]


def test_every_route_of_ours_says_who_may_use_it() -> None:
    app = make_app(OURS)
    assert len(handlers_of(app)) > 20
    for route in app.routes:
        for handler in route.route_handlers:
            if handler.http_methods != {"OPTIONS"}:
                access = handler.opt.get("access")
                assert isinstance(access, Access), handler
                of_admin = access in {Access.ADMIN, Access.PAGE, Access.SIGN_IN}
                changes = {(route.path_format, method) for method in handler.http_methods} <= CHANGES
                assert of_admin == (changes or route.path.startswith("/admin")), handler
                assert (access is Access.ADMIN) == (changes or route.path.startswith("/admin/api")), handler


async def call(http: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    body = {"content": b"{}", "headers": {"content-type": "application/json"}} if method == "POST" else {}
    return await http.request(method, path.replace("{", "").replace("}", ""), **body)


async def test_no_admin_route_answers_over_tcp_without_credentials() -> None:
    app = make_app(OURS)
    paths = [
        (path, method)
        for path, method in paths_of(app)
        if path.startswith("/admin/api") or (path, method) in CHANGES
    ]
    assert len(paths) >= 24
    async with client(app) as http:
        for path, method in paths:
            answer = await call(http, method, path)
            if method != "OPTIONS":
                assert answer.status_code == 401, (method, path, answer.text)
                told = answer.json()["error"]
                assert "admin" in told if isinstance(told, str) else told["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("server", "peer"),
    [
        ({"host": "0.0.0.0"}, "192.168.1.7"),
        ({"host": "0.0.0.0"}, "127.0.0.1"),
        ({"host": "::"}, "::1"),
        ({"require_key": True}, "127.0.0.1"),
        ({}, "192.168.1.7"),
    ],
)
async def test_every_route_is_closed_without_a_key_where_others_can_connect(
    tmp_path: Path, server: dict[str, Any], peer: str
) -> None:
    app = make_app(OURS, guarded(tmp_path, **server))
    opened = set()
    async with client(app, peer=peer) as http:
        for path, method in paths_of(app):
            answer = await call(http, method, path)
            if answer.status_code not in {401, 303}:
                opened.add((path, method))
            elif answer.status_code == 401 and path != "/admin/signin":
                assert answer.headers["www-authenticate"].startswith("Bearer")
                told = answer.json()["error"]  # of Ollama's routes a text
                assert isinstance(told, str) or told["code"] == "invalid_api_key"
    assert opened <= {*OPEN, *((path, "OPTIONS") for path, _ in OPEN)}
    assert {("/", "GET"), ("/health", "GET"), ("/admin/signin", "GET")} <= opened


async def test_a_route_without_a_word_is_closed() -> None:
    app = make_app(HANDLERS)
    for transport in (app, over_unix(app)):
        async with client(transport) as http:
            answer = await http.get("/forgotten")
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "permission_denied"


async def test_admin_is_for_the_unix_socket() -> None:
    app = make_app(HANDLERS)
    async with client(app) as http:
        assert (await http.get("/admin/api/status")).status_code == 401
        spoofed = {"X-Forwarded-Proto": "unix", "X-Real-IP": "127.0.0.1"}
        assert (await http.get("/admin/api/status", headers=spoofed)).status_code == 401
    async with client(over_unix(app)) as http:
        assert (await http.get("/admin/api/status")).text == "state"


async def test_no_new_work_while_draining() -> None:
    services = fake_services()
    async with client(make_app(HANDLERS, services)) as http:
        assert (await http.post("/infer")).status_code == 200
        services.drain.begin()
        refused = await http.post("/infer")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
