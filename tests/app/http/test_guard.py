"""Nothing is served unless its route says to whom."""

from typing import Any

from litestar import Controller, get, post
from litestar.routes import HTTPRoute

from llmbox.app.http.admin import admin_router
from llmbox.app.http.app import App
from llmbox.app.http.guard import Access, default_deny
from llmbox.app.http.openai import openai_router
from support.http_app import client, fake_services, make_app, over_unix


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


def test_every_route_of_ours_says_who_may_use_it() -> None:
    app = make_app([openai_router, admin_router])
    assert len(handlers_of(app)) > 20
    for route in app.routes:
        for handler in route.route_handlers:
            if handler.http_methods != {"OPTIONS"}:
                access = handler.opt.get("access")
                assert isinstance(access, Access), handler
                assert (access is Access.ADMIN) == route.path.startswith("/admin"), handler


async def test_no_admin_route_answers_over_tcp() -> None:
    app = make_app([openai_router, admin_router])
    paths = [(route.path_format, route.methods) for route in app.routes if route.path.startswith("/admin")]
    assert len(paths) >= 8
    async with client(app) as http:
        for path, methods in paths:
            for method in methods - {"OPTIONS"}:
                answer = await http.request(method, path.replace("{", "").replace("}", ""))
                assert answer.status_code == 403, (method, path, answer.text)


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
        assert (await http.get("/admin/api/status")).status_code == 403
        spoofed = {"X-Forwarded-Proto": "unix", "X-Real-IP": "127.0.0.1"}
        assert (await http.get("/admin/api/status", headers=spoofed)).status_code == 403
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
