"""Pages of other origins: nobody's by default, those that the configuration names, and never at /admin."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar import post

from llmbox.app.config.settings import ServerSettings, Settings
from llmbox.app.http.auth.guard import Access
from support.http_app import FakeServices, client, guarded, make_app

CHAT = "https://chat.example"
DEV = "http://localhost:3000"
FROM_CHAT = {"Origin": CHAT, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
ASKING = {**FROM_CHAT, "Access-Control-Request-Method": "POST"}


@post("/v1/work", status_code=200, opt={"access": Access.INFER})
async def work() -> str:
    return "done"


def app_of(*origins: str) -> Any:
    return make_app([work], FakeServices(Settings(server=replace(ServerSettings(), cors_origins=origins))))


def granted(answer: httpx.Response) -> set[str]:
    return {name for name in answer.headers if name.startswith("access-control-")}


@pytest.mark.parametrize("origins", [(), (DEV,), ("https://chat.example.evil",), ("http://chat.example",)])
async def test_pages_that_nobody_named_are_refused(origins: tuple[str, ...]) -> None:
    async with client(app_of(*origins)) as http:
        answers = [
            await http.options("/v1/work", headers=ASKING),
            await http.post("/v1/work", headers=FROM_CHAT),
            await http.get("/health", headers=FROM_CHAT),
        ]
    for answer in answers:
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "cross_site_request"
        assert granted(answer) == set()


async def test_a_named_page_asks_first_and_then_reads_the_answer() -> None:
    wanted = "authorization,content-type,x-stainless-lang"
    async with client(app_of(DEV, CHAT)) as http:
        asked = await http.options("/v1/work", headers={**ASKING, "Access-Control-Request-Headers": wanted})
        done = await http.post("/v1/work", headers=FROM_CHAT)
        other = await http.post("/v1/work", headers={"Origin": DEV.upper().replace("HTTP", "http")})
    assert (asked.status_code, asked.content) == (204, b"")
    assert asked.headers["access-control-allow-origin"] == CHAT
    assert asked.headers["access-control-allow-headers"] == wanted
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert (done.status_code, done.text) == (200, "done")
    assert done.headers["access-control-allow-origin"] == CHAT
    assert "x-request-id" in done.headers["access-control-expose-headers"]
    assert done.headers["vary"] == asked.headers["vary"] == "Origin"
    assert other.status_code == 200
    for answer in (asked, done):
        assert "access-control-allow-credentials" not in answer.headers
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_named_page_reads_errors_and_needs_the_key_that_others_need(tmp_path: Path) -> None:
    app = make_app([work], guarded(tmp_path, require_key=True, cors_origins=(CHAT,)))
    async with client(app) as http:
        asked = await http.options("/v1/work", headers=ASKING)
        answers = [
            await http.post("/v1/work", headers=FROM_CHAT),
            await http.get("/nope", headers=FROM_CHAT),
            await http.post("/v1/work", headers=FROM_CHAT, content=b"x" * 3_000_000),
        ]
    assert asked.status_code == 204
    assert [answer.status_code for answer in answers] == [401, 404, 413]
    assert all(answer.headers["access-control-allow-origin"] == CHAT for answer in answers)


@pytest.mark.parametrize("path", ["/admin/api/status", "/admin", "//admin/api/status", "/admin/signin"])
async def test_the_panel_and_the_admin_api_are_for_no_other_page(path: str) -> None:
    async with client(app_of(CHAT)) as http:
        for method, headers in [("OPTIONS", ASKING), ("GET", FROM_CHAT), ("POST", FROM_CHAT)]:
            request = http.build_request(method, "/", headers=headers)
            request.url = request.url.copy_with(raw_path=path.encode())
            answer = await http.send(request)
            assert answer.status_code == 403, (method, path)
            assert granted(answer) == set()


async def test_a_named_page_still_needs_a_host_of_ours() -> None:
    async with client(app_of(CHAT)) as http:
        answer = await http.options("/v1/work", headers={**ASKING, "Host": "evil.example"})
    assert answer.status_code == 421
    assert granted(answer) == set()


@pytest.mark.parametrize("names", ["a b", "x\x01y", "*", "a," * 70 + "a", "a" * 65])
async def test_odd_header_names_are_not_sent_back(names: str) -> None:
    async with client(app_of(CHAT)) as http:
        answer = await http.options("/v1/work", headers={**ASKING, "Access-Control-Request-Headers": names})
    assert answer.status_code == 204
    assert "access-control-allow-headers" not in answer.headers


async def test_a_private_network_is_granted_only_where_it_is_asked_for() -> None:
    header = "access-control-allow-private-network"
    async with client(app_of(CHAT)) as http:
        plain = await http.options("/v1/work", headers=ASKING)
        asked = await http.options(
            "/v1/work", headers={**ASKING, "Access-Control-Request-Private-Network": "true"}
        )
    assert header not in plain.headers
    assert asked.headers[header] == "true"


async def test_options_of_other_programs_are_answered_as_before() -> None:
    async with client(app_of(CHAT)) as http:
        answer = await http.options("/v1/work")
    assert "POST" in answer.headers["allow"]
    assert granted(answer) == set()
