"""Links, sessions and CSRF, as a browser meets them."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar import Request, get, post
from litestar.datastructures import State

from llmbox.app.http.app import App
from llmbox.app.http.auth.guard import Access, csrf_token, identity_of
from llmbox.app.http.server.request import form_of
from llmbox.app.security.keys import KeySpec
from llmbox.app.security.security import ABSOLUTE, GRACE, IDLE, ROTATE, TOKEN_LIFE, Security
from support.clock import Clock
from support.http_app import client, guarded, make_app
from support.lanes import examples

FORM = {"content-type": "application/x-www-form-urlencoded"}


@get("/admin", opt={"access": Access.PAGE})
async def home(request: Request[Any, Any, State]) -> str:
    return csrf_token(request)


@post("/admin/change", opt={"access": Access.PAGE, "form": True}, status_code=200)
async def change(request: Request[Any, Any, State]) -> str:
    return (await form_of(request))["what"]


@post("/admin/api/change", opt={"access": Access.ADMIN}, status_code=200)
async def api_change() -> str:
    return "changed"


@post("/infer", opt={"access": Access.INFER}, status_code=200)
async def infer(request: Request[Any, Any, State]) -> str:
    return identity_of(request).name


class Box:
    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        services = guarded(folder, self.clock)
        self.security: Security = services.security
        self.app: App = make_app([home, change, api_change, infer], services)

    def browser(self, peer: str = "127.0.0.1") -> httpx.AsyncClient:
        return client(self.app, host="localhost:7411", peer=peer)

    def link(self) -> str:
        return self.security.sign_in_link("http://localhost:7411")


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


@pytest.fixture
async def signed_in(box: Box) -> AsyncIterator[httpx.AsyncClient]:
    async with box.browser() as http:
        answer = await http.post("/admin/signin", data={"token": box.link().partition("token=")[2]})
        assert answer.status_code == 303
        yield http


async def test_the_link_is_followed_by_a_button_and_works_once(box: Box) -> None:
    link = box.link()
    async with box.browser() as http:
        for _ in range(3):  # previews look as often as they like
            page = await http.get(link)
            assert page.status_code == 200
            assert page.headers["content-type"].startswith("text/html")
            assert page.headers["cache-control"] == "no-store"
            assert page.headers["referrer-policy"] == "same-origin"
            assert "set-cookie" not in page.headers
        found = re.search(r'name="token" value="([^"]+)"', page.text)
        assert found
        answer = await http.post("/admin/signin", data={"token": found[1]})
        assert (answer.status_code, answer.headers["location"]) == (303, "/admin")
        cookie = answer.headers["set-cookie"]
        for attribute in ("HttpOnly", "SameSite=Strict", "Path=/", f"Max-Age={int(ABSOLUTE)}"):
            assert attribute in cookie
        assert cookie.startswith("llmbox_7411=")
        assert (await http.get("/admin")).status_code == 200
        assert (await http.get("/admin/signin")).headers["location"] == "/admin"
    async with box.browser() as other:
        assert (await other.post("/admin/signin", data={"token": found[1]})).status_code == 401
        assert (await other.get("/admin")).status_code == 303


async def test_a_link_ends_after_15_minutes(box: Box) -> None:
    token = box.link().partition("token=")[2]
    box.clock.now += TOKEN_LIFE
    async with box.browser() as http:
        assert (await http.post("/admin/signin", data={"token": token})).status_code == 401


async def test_an_admin_key_signs_in_and_takes_its_sessions_along(box: Box) -> None:
    _, admin = box.security.keys.add(KeySpec(name="admin", scopes=("admin",)))
    _, plain = box.security.keys.add(KeySpec(name="plain", scopes=("infer", "read")))
    async with box.browser() as http:
        for wrong in (plain, "sk-llmbox-" + "x" * 43, "", "none"):
            answer = await http.post("/admin/signin", data={"key": wrong})
            assert answer.status_code == 401
            assert "set-cookie" not in answer.headers
        assert (await http.post("/admin/signin", data={"key": f" {admin} "})).status_code == 303
        assert (await http.get("/admin")).status_code == 200
        box.security.keys.rotate("admin")
        assert (await http.get("/admin")).status_code == 303


async def test_changes_need_the_csrf_token(box: Box, signed_in: httpx.AsyncClient) -> None:
    token = (await signed_in.get("/admin")).text
    assert len(token) == 43
    body = {"json": {}}
    refused = await signed_in.post("/admin/api/change", **body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf_failed")
    other, _ = box.security.sessions.open()
    for wrong in ("", "x", other.csrf_token, token[:-1]):
        answer = await signed_in.post("/admin/api/change", **body, headers={"x-csrf-token": wrong})
        assert answer.status_code == 403
    right = {"x-csrf-token": token}
    assert (await signed_in.post("/admin/api/change", **body, headers=right)).status_code == 200
    assert (await signed_in.post("/admin/change", data={"what": "a"})).status_code == 403
    form = await signed_in.post("/admin/change", data={"what": "a b", "csrf_token": token})
    assert (form.status_code, form.text) == (200, "a b")
    assert (await signed_in.post("/infer", **body)).status_code == 403
    worked = await signed_in.post("/infer", **body, headers=right)
    assert worked.text == "(panel)"


async def test_a_key_needs_no_csrf_token(box: Box) -> None:
    _, secret = box.security.keys.add(KeySpec(name="admin", scopes=("admin",)))
    async with box.browser() as http:
        answer = await http.post("/admin/api/change", headers={"authorization": f"Bearer {secret}"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:3000"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_another_page_cannot_sign_anybody_in_or_out(
    box: Box, signed_in: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    token = box.link().partition("token=")[2]
    answer = await signed_in.post("/admin/signin", data={"token": token}, headers=headers)
    assert answer.status_code == 403
    assert (await signed_in.post("/admin/signout", headers=headers)).status_code == 403
    assert box.security.tokens.use(token), "it was not used up"
    assert (await signed_in.get("/admin")).status_code == 200


async def test_signing_out(box: Box, signed_in: httpx.AsyncClient) -> None:
    token = (await signed_in.get("/admin")).text
    cookies = dict(signed_in.cookies)
    answer = await signed_in.post("/admin/signout", data={"csrf_token": token})
    assert (answer.status_code, answer.headers["location"]) == (303, "/admin/signin")
    assert "Max-Age=0" in answer.headers["set-cookie"]
    async with box.browser() as thief:
        thief.cookies.update(cookies)
        assert (await thief.get("/admin")).status_code == 303


async def test_signing_in_again_ends_the_old_session(box: Box, signed_in: httpx.AsyncClient) -> None:
    cookies = dict(signed_in.cookies)
    token = box.link().partition("token=")[2]
    assert (await signed_in.post("/admin/signin", data={"token": token})).status_code == 303
    assert dict(signed_in.cookies) != cookies
    async with box.browser() as other:
        other.cookies.update(cookies)
        assert (await other.get("/admin")).status_code == 303


async def test_a_cookie_that_somebody_planted_is_not_adopted(box: Box) -> None:
    async with box.browser() as http:
        http.cookies.set("llmbox_7411", "planted", domain="localhost.local")
        assert (await http.get("/admin")).status_code == 303
        token = box.link().partition("token=")[2]
        answer = await http.post("/admin/signin", data={"token": token})
        assert "planted" not in answer.headers["set-cookie"]


async def test_the_cookie_changes_while_the_session_lives(box: Box, signed_in: httpx.AsyncClient) -> None:
    before = dict(signed_in.cookies)
    box.clock.now += ROTATE
    answer = await signed_in.get("/admin")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert dict(signed_in.cookies) != before
    box.clock.now += GRACE + 1
    assert (await signed_in.get("/admin")).status_code == 200
    async with box.browser() as thief:
        thief.cookies.update(before)
        assert (await thief.get("/admin")).status_code == 303


async def test_an_idle_session_ends(box: Box, signed_in: httpx.AsyncClient) -> None:
    box.clock.now += IDLE
    assert (await signed_in.get("/admin")).status_code == 303


async def test_guessing_gets_slow_for_one_address_alone(box: Box) -> None:
    async with box.browser() as http, box.browser("192.168.1.9") as other:
        for _ in range(5):
            assert (await http.post("/admin/signin", data={"token": "guess"})).status_code == 401
        token = box.link().partition("token=")[2]
        refused = await http.post("/admin/signin", data={"token": token})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert (await other.post("/admin/signin", data={"token": "guess"})).status_code == 401
        box.clock.now += 1
        assert (await http.post("/admin/signin", data={"token": token})).status_code == 303


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 401),
        (b"token=a&token=b", 400),
        (b"token=%ff", 400),
        (b"token", 400),
        (b"\xff\xfe", 400),
        (b"&" * 2000, 400),
        (b"a=b&" * 600, 400),
        (b"token=" + b"x" * 100_000, 401),
        (b"token=%00", 401),
    ],
)
async def test_bad_forms(box: Box, body: bytes, status: int) -> None:
    async with box.browser() as http:
        answer = await http.post("/admin/signin", content=body, headers=FORM)
    assert answer.status_code == status


async def test_json_is_no_form(box: Box) -> None:
    async with box.browser() as http:
        answer = await http.post("/admin/signin", json={"token": box.link().partition("token=")[2]})
    assert answer.status_code == 400


async def test_the_page_escapes_what_the_link_says(box: Box) -> None:
    async with box.browser() as http:
        page = await http.get("/admin/signin", params={"token": '"><script>alert(1)</script>'})
    assert "<script>" not in page.text
    assert "&quot;&gt;&lt;script" in page.text


@given(st.sampled_from([b"cookie", b"x-csrf-token", b"hx-request"]), st.binary(max_size=100), st.booleans())
@settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_header_of_any_bytes_signs_in(box: Box, name: bytes, value: bytes, named: bool) -> None:
    value = b"llmbox_7411=" + value if named else value
    async with box.browser() as http:
        for method in ("GET", "POST"):
            answer = await http.send(
                httpx.Request(method, "http://localhost:7411/admin", headers=[(name, value)])
            )
            assert answer.status_code in {303, 401, 405}
