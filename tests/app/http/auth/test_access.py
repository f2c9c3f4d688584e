"""What keys open, what they do not, and what a wrong one is told."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar import Request, get, post
from litestar.datastructures import State

from llmbox.app.http.auth.guard import Access, identity_of
from llmbox.app.security.keys import PREFIX, ApiKey, KeySpec
from llmbox.app.security.security import LOCAL, NOBODY, Identity
from support.clock import Clock
from support.http_app import FakeServices, client, guarded, make_app, over_unix
from support.lanes import examples


@get("/known", opt={"access": Access.KNOWN})
async def known(request: Request[Any, Any, State]) -> str:
    return identity_of(request).kind


@get("/read", opt={"access": Access.READ})
async def read() -> str:
    return "numbers"


@post("/infer", opt={"access": Access.INFER}, status_code=200)
async def infer() -> str:
    return "tokens"


@get("/admin/api/thing", opt={"access": Access.ADMIN})
async def admin() -> str:
    return "state"


@get("/admin/page", opt={"access": Access.PAGE})
async def page() -> str:
    return "page"


HANDLERS = [known, read, infer, admin, page]
ROUTES = [
    ("GET", "/known"),
    ("GET", "/read"),
    ("POST", "/infer"),
    ("GET", "/admin/api/thing"),
    ("GET", "/admin/page"),
]


class Refusals:
    """The gateway's part that the guard calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def record_refusal(self, _id: str, _path: str, _model: str, error: Any, *, key: str) -> None:
        self.seen.append((error.code, key))


def opened(tmp_path: Path, **server: Any) -> FakeServices:
    services = guarded(tmp_path, **{"host": "0.0.0.0", **server})
    services.gateway = Refusals()  # type: ignore[attr-defined]
    return services


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def statuses(app: Any, headers: dict[str, str], peer: str = "192.168.1.7") -> list[int]:
    async with client(app, peer=peer, headers=headers) as http:
        return [(await http.request(method, path)).status_code for method, path in ROUTES]


@pytest.mark.parametrize(
    ("scopes", "expected"),
    [
        (("infer",), [200, 403, 200, 403, 403]),
        (("read",), [200, 200, 403, 403, 403]),
        (("infer", "read"), [200, 200, 200, 403, 403]),
        (("admin",), [200, 200, 200, 200, 200]),
    ],
)
async def test_scopes(tmp_path: Path, scopes: Any, expected: list[int]) -> None:
    services = opened(tmp_path)
    _, secret = services.security.keys.add(KeySpec(name="k", scopes=scopes))
    assert await statuses(make_app(HANDLERS, services), bearer(secret)) == expected
    assert await statuses(make_app(HANDLERS, services), {"x-api-key": secret}) == expected


async def test_without_a_key(tmp_path: Path) -> None:
    open_app = make_app(HANDLERS, opened(tmp_path))
    assert await statuses(open_app, {}) == [401, 401, 401, 401, 303]
    assert await statuses(open_app, {}, peer="127.0.0.1") == [401, 401, 401, 401, 303]
    home = make_app(HANDLERS, opened(tmp_path, host="127.0.0.1"))
    assert await statuses(home, {}, peer="127.0.0.1") == [200, 200, 200, 401, 303]
    assert await statuses(home, {}, peer="::1") == [200, 200, 200, 401, 303]
    assert await statuses(home, bearer("none"), peer="127.0.0.1") == [200, 200, 200, 401, 303]
    asking = make_app(HANDLERS, opened(tmp_path, host="127.0.0.1", require_key=True))
    assert await statuses(asking, {}, peer="127.0.0.1") == [401, 401, 401, 401, 303]


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-host", "via"])
async def test_a_proxy_on_this_machine_opens_nothing(tmp_path: Path, header: str) -> None:
    app = make_app(HANDLERS, opened(tmp_path, host="127.0.0.1"))
    assert await statuses(app, {header: "127.0.0.1"}, peer="127.0.0.1") == [401, 401, 401, 401, 303]
    assert await statuses(over_unix(app), {header: "127.0.0.1"}) == [401, 401, 401, 401, 303]


async def test_a_reload_does_not_make_an_open_port_a_closed_one(tmp_path: Path) -> None:
    services = opened(tmp_path)
    app = make_app(HANDLERS, services)
    services.settings = guarded(tmp_path, host="127.0.0.1").settings
    assert await statuses(app, {}, peer="127.0.0.1") == [401, 401, 401, 401, 303]


async def test_a_key_that_is_not_good_is_never_taken_for_none(tmp_path: Path) -> None:
    services = opened(tmp_path, host="127.0.0.1")
    keys = services.security.keys
    _, expired = keys.add(KeySpec(name="old", expires=1.0))
    _, revoked = keys.add(KeySpec(name="gone"))
    keys.remove("gone")
    app = make_app(HANDLERS, services)
    for secret in (expired, revoked, PREFIX, PREFIX + "x" * 43):
        assert await statuses(app, bearer(secret), peer="127.0.0.1") == [401] * 5
        assert await statuses(over_unix(app), bearer(secret)) == [401] * 5


async def test_the_answer_is_openais(tmp_path: Path) -> None:
    services = opened(tmp_path)
    _, secret = services.security.keys.add(KeySpec(name="k", scopes=("read",)))
    async with client(make_app(HANDLERS, services), peer="10.0.0.2") as http:
        missing = await http.get("/known")
        wrong = await http.get("/known", headers=bearer(PREFIX + "wrong-one"))
        lacking = await http.post("/infer", headers=bearer(secret))
    for answer in (missing, wrong):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == 'Bearer realm="llmbox"'
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.json()["error"]["type"] == "authentication_error"
        assert "wrong-one" not in answer.text
    assert lacking.status_code == 403
    assert lacking.json()["error"]["code"] == "insufficient_scope"
    assert set(lacking.json()["error"]) == {"message", "type", "param", "code"}


async def test_two_keys_in_one_request_are_refused(tmp_path: Path) -> None:
    services = opened(tmp_path)
    one = services.security.keys.add(KeySpec(name="one"))[1]
    two = services.security.keys.add(KeySpec(name="two", scopes=("admin",)))[1]
    app = make_app(HANDLERS, services)
    async with client(app, peer="10.0.0.2") as http:
        twice = [("authorization", f"Bearer {one}"), ("authorization", f"Bearer {two}")]
        assert (await http.get("/known", headers=twice)).status_code == 401
        assert (await http.get("/known", headers={**bearer(one), "x-api-key": two})).status_code == 401
        assert (await http.get("/known", headers={**bearer(one), "x-api-key": one})).status_code == 200


async def test_the_unix_socket_needs_nothing_and_a_key_counts_where_it_is_shown(tmp_path: Path) -> None:
    services = opened(tmp_path)
    _, secret = services.security.keys.add(KeySpec(name="k"))
    app = over_unix(make_app(HANDLERS, services))
    assert await statuses(app, {}) == [200] * 5
    assert await statuses(app, bearer("none")) == [200] * 5
    assert await statuses(app, bearer(secret)) == [200, 403, 200, 403, 403]


async def test_pages_lead_to_the_sign_in(tmp_path: Path) -> None:
    async with client(make_app(HANDLERS, opened(tmp_path)), peer="10.0.0.2") as http:
        whole = await http.get("/admin/page")
        fragment = await http.get("/admin/page", headers={"hx-request": "true"})
    assert (whole.status_code, whole.headers["location"]) == (303, "/admin/signin")
    assert (fragment.status_code, fragment.headers["hx-redirect"]) == (401, "/admin/signin")


async def test_requests_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    services = opened(tmp_path)
    services.security = guarded(tmp_path, clock).security
    _, secret = services.security.keys.add(KeySpec(name="k", rpm=2, tpm=100))
    async with client(make_app(HANDLERS, services), peer="10.0.0.2", headers=bearer(secret)) as http:
        first = await http.post("/infer")
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        assert (await http.get("/known")).status_code == 200, "asking what there is costs nothing"
        assert (await http.post("/infer")).status_code == 200
        refused = await http.post("/infer")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "30"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert services.gateway.seen == [("rate_limit_exceeded", "k")]  # type: ignore[attr-defined]
        clock.now += 30
        assert (await http.post("/infer")).status_code == 200


async def test_dns_rebinding_ends_before_keys_are_looked_at(tmp_path: Path) -> None:
    services = opened(tmp_path, host="127.0.0.1")
    _, secret = services.security.keys.add(KeySpec(name="k", scopes=("admin",)))
    app = make_app(HANDLERS, services)
    hosts = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "localhost:1", "[::1].x", ""]
    async with client(app, peer="127.0.0.1", headers=bearer(secret)) as http:
        for host in hosts:
            for method, path in [
                *ROUTES,
                ("GET", "/admin/signin"),
                ("POST", "/admin/signin"),
                ("GET", "/health"),
            ]:
                answer = await http.request(method, path, headers={"host": host})
                assert answer.status_code == 421, (host, path)


async def test_a_foreign_page_is_refused_even_with_a_good_key(tmp_path: Path) -> None:
    services = opened(tmp_path)
    _, secret = services.security.keys.add(KeySpec(name="k", scopes=("admin",)))
    foreign = {**bearer(secret), "origin": "https://evil.example", "sec-fetch-site": "cross-site"}
    assert await statuses(make_app(HANDLERS, services), foreign) == [403] * 5


async def test_forms_are_for_routes_that_take_them(tmp_path: Path) -> None:
    services = opened(tmp_path)
    _, secret = services.security.keys.add(KeySpec(name="k", scopes=("admin",)))
    async with client(make_app(HANDLERS, services), peer="10.0.0.2", headers=bearer(secret)) as http:
        answer = await http.post("/infer", data={"a": "b"})
    assert answer.status_code == 415


@pytest.fixture
def app_with_a_key(tmp_path: Path) -> Any:
    services = opened(tmp_path)
    services.security.keys.add(KeySpec(name="k", scopes=("admin",)))
    return make_app(HANDLERS, services)


SCHEMES = st.sampled_from(["Bearer", "bearer", "BEARER", "Basic", "Digest", "", "Bearer Bearer", "\tBearer"])


@given(scheme=SCHEMES, gap=st.sampled_from([" ", "  ", "\t", ""]), rest=st.binary(max_size=120))
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_header_of_any_bytes_opens_anything(
    app_with_a_key: Any, scheme: str, gap: str, rest: bytes
) -> None:
    for value in (f"{scheme}{gap}".encode() + rest, f"{scheme}{gap}{PREFIX}".encode() + rest):
        for name in (b"authorization", b"x-api-key"):
            async with client(app_with_a_key, peer="10.0.0.2") as http:
                answer = await http.send(
                    httpx.Request("GET", "http://localhost/admin/api/thing", headers=[(name, value)])
                )
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"


def test_priorities_and_namespaces() -> None:
    def key(name: str, **more: Any) -> Identity:
        return Identity(
            "key", ApiKey(name=name, id=f"key_{name}", digest="", display="", created=0.0, **more)
        )

    assert [key("a", priority=5).priority(asked) for asked in (-10, 0, 7)] == [5, 5, 7]
    assert [key("a", priority=-5).priority(asked) for asked in (-9, None, 0, 3)] == [-5, -5, -5, 3]
    assert [NOBODY.priority(asked) for asked in (-3, None, 0, 3)] == [0, 0, 0, 3]
    assert [LOCAL.priority(asked) for asked in (-3, None, 3)] == [-3, 0, 3]
    assert [caller.tenant for caller in (key("a"), NOBODY, LOCAL)] == ["key_a", "", ""]
    salts = ["", "x", "key_a", "key_a/", "/", "key_a/x"]
    callers = [key("a"), key("b"), NOBODY]
    spaces = [caller.cache_namespace(salt) for caller in callers for salt in salts]
    assert len(set(spaces)) == len(spaces)
    assert NOBODY.cache_namespace("") == LOCAL.cache_namespace("") == ""


async def test_wrong_keys_of_an_address_are_limited_and_right_ones_are_not(tmp_path: Path) -> None:
    clock = Clock()
    services = guarded(tmp_path, clock, host="0.0.0.0")
    _, secret = services.security.keys.add(KeySpec(name="ci"))
    wrong, right = ({"Authorization": f"Bearer {text}"} for text in (f"{PREFIX}wrong", secret))
    app = make_app(HANDLERS, services)
    async with client(app) as http, client(app, peer="192.0.2.7") as other:
        for _ in range(60):
            assert (await http.get("/known", headers=wrong)).status_code == 401
        refused = await http.get("/known", headers=wrong)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["code"] == "too_many_attempts"
        assert "llmbox key ls` shows" in refused.json()["error"]["message"]
        assert (await http.get("/known", headers=right)).status_code == 200
        assert (await other.get("/known", headers=wrong)).status_code == 401
        clock.now += 1
        assert (await http.get("/known", headers=wrong)).status_code == 401
