"""What holds for every request, whether or not a route exists for it."""

import asyncio

import httpx
import msgspec
import pytest
from litestar import delete, get, post
from litestar.params import FromPath, JSONBody

from llmbox.app.http.auth.guard import Access
from llmbox.app.http.server import sockets
from llmbox.app.http.server.origin import HostList
from support.http_app import allowing, client, fake_services, make_app, over_unix

PATHS = ["/health", "/no/such/route", "/echo"]


class Body(msgspec.Struct):
    text: str


@post("/echo", status_code=200, opt={"access": Access.INFER})
async def echo(data: JSONBody[Body]) -> str:
    return data.text


@get("/boom", opt={"access": Access.READ})
async def boom() -> None:
    raise RuntimeError("secret at /etc/shadow")


class Panic(BaseException):
    """Such as libraries in Rust raise: no `Exception`."""


@get("/panic", opt={"access": Access.READ})
async def panic() -> None:
    raise Panic("secret at /etc/shadow")


def check_error(answer: httpx.Response, status: int, code: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if code:
        assert error["code"] == code


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_a_foreign_host_is_refused_on_every_method(method: str, path: str) -> None:
    async with client(make_app([echo])) as http:
        answer = await http.request(method, path, headers={"Host": "evil.example"})
    assert answer.status_code == 421
    if method != "HEAD":
        check_error(answer, 421, "host_not_allowed")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:7411", 200),
        ("localhost:7411", 200),
        ("LOCALHOST:7411", 200),
        ("127.0.0.1", 421),
        ("localhost", 421),
        ("localhost:7412", 421),
        ("localhost.:7411", 421),
        ("localhost:7411.evil.example", 421),
        ("127.0.0.1.evil.example:7411", 421),
        ("0.0.0.0:7411", 421),
        ("[::1]:7411", 421),
        ("user@localhost:7411", 421),
        ("", 421),
    ],
)
async def test_host_must_match_exactly_with_its_port(host: str, status: int) -> None:
    async with client(make_app(), "127.0.0.1:7411") as http:
        assert (await http.get("/health", headers={"Host": host})).status_code == status


async def test_the_ipv6_address_is_written_in_brackets() -> None:
    async with client(make_app(), "[::1]:7411") as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/health", headers={"Host": "::1:7411"})).status_code == 421


async def test_configured_hosts() -> None:
    app = make_app(services=allowing("box.lan", "proxy.lan:443"))
    async with client(app, "127.0.0.1:7411") as http:
        for host, status in [
            ("box.lan", 200),
            ("box.lan:7411", 200),
            ("box.lan:1", 421),
            ("proxy.lan:443", 200),
            ("proxy.lan", 421),
        ]:
            assert (await http.get("/health", headers={"Host": host})).status_code == status, host


async def test_two_hosts_or_none_are_refused() -> None:
    async with client(make_app()) as http:
        two = [("Host", "localhost"), ("Host", "localhost")]
        assert (await http.get("/health", headers=two)).status_code == 421
        request = http.build_request("GET", "/health")
        del request.headers["Host"]
        assert (await http.send(request)).status_code == 421


async def test_forwarded_headers_change_nothing() -> None:
    headers = {"X-Forwarded-Host": "evil.example", "X-Forwarded-For": "1.2.3.4", "Forwarded": "host=evil"}
    async with client(make_app()) as http:
        assert (await http.get("/health", headers=headers)).status_code == 200
        answer = await http.get(
            "/health", headers={**headers, "Host": "evil.example", "X-Forwarded-Host": "localhost"}
        )
        assert answer.status_code == 421


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "null", "Sec-Fetch-Site": "same-origin"}, 403),
        ({"Origin": "file://"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 403),
    ],
)
async def test_other_web_pages_cannot_post(headers: dict[str, str], status: int) -> None:
    async with client(make_app([echo])) as http:
        answer = await http.post("/echo", json={"text": "hi"}, headers=headers)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


async def test_other_web_pages_can_link_but_not_fetch() -> None:
    cross = {"Sec-Fetch-Site": "cross-site"}
    async with client(make_app()) as http:
        link = {**cross, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert (await http.get("/", headers=link)).status_code == 200
        for mode, dest in [
            ("no-cors", "empty"),
            ("cors", "empty"),
            ("navigate", "iframe"),
            ("no-cors", "script"),
        ]:
            headers = {**cross, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
            check_error(await http.get("/version", headers=headers), 403, "cross_site_request")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200),
        ("APPLICATION/JSON", 200),
        ("application/json; charset=utf-8", 200),
        ('application/json; charset="UTF-8"', 200),
        ("application/json; charset=latin-1", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
async def test_bodies_are_json_and_say_so(kind: str, status: int) -> None:
    async with client(make_app([echo])) as http:
        answer = await http.post("/echo", content=b'{"text": "hi"}', headers={"Content-Type": kind})
    assert answer.status_code == status


async def test_compressed_bodies_are_refused() -> None:
    async with client(make_app([echo])) as http:
        answer = await http.post("/echo", json={"text": "x"}, headers={"Content-Encoding": "gzip"})
        check_error(answer, 415)


async def test_a_missing_body_is_named() -> None:
    async with client(make_app([echo])) as http:
        check_error(await http.post("/echo"), 400, "invalid_json")


async def test_body_size_is_bounded_with_and_without_content_length() -> None:
    app = make_app([echo], fake_services(body_bytes=1024))
    fits, too_big = b'{"text": "%b"}' % (b"a" * 1000), b'{"text": "%b"}' % (b"a" * 1020)

    async def chunks(body: bytes):
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    headers = {"Content-Type": "application/json"}
    async with client(app) as http:
        for body, status in ((fits, 200), (too_big, 413)):
            known = await http.post("/echo", content=body, headers=headers)
            chunked = await http.post("/echo", content=chunks(body), headers=headers)
            assert (known.status_code, chunked.status_code) == (status, status)
            told = [answer.json()["error"]["message"] for answer in (known, chunked) if status == 413]
            assert all("1,024 bytes" in message for message in told)
        for length in ("9" * 30, "-1", "1e3", "1_0"):
            request = http.build_request("POST", "/echo", headers=headers)
            request.headers["Content-Length"] = length
            assert (await http.send(request)).status_code in {400, 413}


async def test_request_ids_come_back() -> None:
    async with client(make_app()) as http:
        given = await http.get("/health", headers={"X-Request-Id": "my-id.1"})
        assert given.headers["x-request-id"] == "my-id.1"
        for bad in ("", "two words", "x" * 129, "inj\tection"):
            answer = await http.get("/health", headers={"X-Request-Id": bad})
            assert answer.headers["x-request-id"].startswith("req_")
        first, second = await http.get("/health"), await http.get("/nope")
        assert first.headers["x-request-id"] != second.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/nope", "/boom", "/openapi.json"])
async def test_every_answer_carries_the_headers(path: str) -> None:
    async with client(make_app([boom])) as http:
        headers = (await http.get(path)).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert headers["openai-processing-ms"].isdigit()


async def test_errors_have_one_shape_and_tell_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with client(make_app([boom, echo])) as http:
        check_error(await http.get("/nope"), 404, "not_found")
        wrong = await http.get("/echo")
        check_error(wrong, 405, "method_not_allowed")
        assert "It supports POST." in wrong.text
        answer = await http.get("/boom")
    check_error(answer, 500, "internal_error")
    assert "secret" not in answer.text
    assert "shadow" not in answer.text
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("path", "meant"),
    [("/echo", "/v1/echo"), ("/v1/v1/echo", "/v1/echo"), ("/v1/health/", "/health"), ("/v1/nope", None)],
)
async def test_a_client_with_a_wrong_base_url_is_told_of_the_right_one(path: str, meant: str | None) -> None:
    @post("/v1/echo", opt={"access": Access.INFER})
    async def versioned() -> None: ...

    async with client(make_app([versioned])) as http:
        answer = await http.post(path, json={})
    check_error(answer, 404, "not_found")
    message = answer.json()["error"]["message"]
    assert (f"there is {meant}." in message) == (meant is not None)
    assert ("base URL" in message) == (meant is not None)


async def test_a_panic_is_an_error_like_others(caplog: pytest.LogCaptureFixture) -> None:
    """No framework catches it: uvicorn would answer in plain text."""
    async with client(make_app([panic])) as http:
        check_error(await http.get("/panic"), 500, "internal_error")
    assert "Panic" in caplog.text


@pytest.mark.parametrize(("path", "methods"), [("/echo", "OPTIONS, POST"), ("/health", "GET, HEAD, OPTIONS")])
async def test_405_and_options_name_the_same_methods(path: str, methods: str) -> None:
    async with client(make_app([echo])) as http:
        refused = await http.patch(path)
        assert refused.status_code == 405
        assert refused.headers["allow"] == (await http.options(path)).headers["allow"] == methods


async def test_options_names_the_methods_of_all_handlers_of_a_path() -> None:
    @get("/both/{name:str}")
    async def read(name: FromPath[str]) -> str:
        return name

    @delete("/both/{name:str}")
    async def remove(name: FromPath[str]) -> None:
        del name

    async with client(make_app([read, remove])) as http:
        for method in ("OPTIONS", "PATCH"):
            answer = await http.request(method, "/both/x")
            assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS", method


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/metrics", "/openapi.json"])
async def test_head_is_get_without_the_body(path: str) -> None:
    async with client(make_app()) as http:
        head, get_ = await http.head(path), await http.get(path)
    assert head.status_code == get_.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get_.headers["content-type"]


@pytest.mark.parametrize(
    "path", ["/%00", "/%ff%fe", "//health//", "/../../etc/passwd", "/%2e%2e/x", "/" + "a" * 5000]
)
async def test_odd_paths_are_not_found(path: str) -> None:
    async with client(over_unix(make_app())) as http:
        request = http.build_request("GET", "/")
        request.url = request.url.copy_with(raw_path=path.encode())
        assert (await http.send(request)).status_code in {200, 404}


@pytest.mark.parametrize("host", ["box.local", "box.example.net", "box.example.net.local"])
def test_a_host_name_with_a_domain_is_also_known_as_mdns_announces_it(host):
    hosts = HostList(machine="Box.example.net")
    assert hosts.allows({"server": ("192.0.2.7", 7411)}, f"{host}:7411".encode())
    assert not hosts.allows({"server": ("192.0.2.7", 7411)}, b"box:7411")


@pytest.mark.parametrize("large", [True, False])
async def test_the_memory_of_a_large_body_is_returned(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = asyncio.Event()
    monkeypatch.setattr(sockets, "_TRIM_SECONDS", 0)
    monkeypatch.setattr(sockets.BodyMemory, "_trim", lambda _: planned.set())
    async with client(make_app([echo])) as http:
        text = "a" * (sockets.LARGE_BODY if large else 1000)
        assert (await http.post("/echo", json={"text": text})).status_code == 200
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert planned.is_set() == large


async def test_large_bodies_of_open_requests_have_a_bound() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    @post("/wait", status_code=200, opt={"access": Access.INFER})
    async def wait(data: JSONBody[Body]) -> str:
        begun.set()
        await go_on.wait()
        return data.text[:1]

    text = {"text": "a" * (3 << 19)}
    app = make_app([wait, echo], fake_services(open_body_bytes=2 << 20))
    async with client(app) as http:
        first = asyncio.create_task(http.post("/wait", json=text))
        await begun.wait()
        refused = await http.post("/echo", json=text)
        check_error(refused, 503, "too_many_large_bodies")
        assert refused.headers["retry-after"] == "5"
        assert (await http.post("/echo", json={"text": "small"})).status_code == 200
        go_on.set()
        assert (await first).text == "a"
        assert (await http.post("/echo", json=text)).status_code == 200


async def test_body_that_open_bodies_never_have_room_for_is_too_large() -> None:
    app = make_app([echo], fake_services(open_body_bytes=1 << 20))
    async with client(app) as http:
        refused = await http.post("/echo", json={"text": "a" * 1_000_000})
    check_error(refused, 413, "request_too_large")
    assert "at most 917,504 bytes" in refused.text
    assert "limits.open_body_bytes" in refused.text
