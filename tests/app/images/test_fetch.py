"""Pictures by URL: from the public Internet alone, whatever names, redirects and answers say."""

import asyncio
from collections.abc import Callable

import pytest

from llmbox.app.images import source
from llmbox.app.images.source import FetchError, fetch_image, is_own, is_public

INSIDE = [
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1"),
    *("2002:7f00:1::", "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "localhost", ""),
]
UNREACHABLE = ["2606:4700:4700::1001", "1.0.0.1"]
OUTSIDE = ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_of_the_machine_and_its_networks_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", OUTSIDE)
def test_other_addresses_are_public(address):
    assert is_public(address)


def fetching(
    url: str, *answers: bytes, addresses: Callable[[str], list[str]] | None = None, most: int = 1000
):
    """Fetch from a server on loopback that gives these answers in turn. `addresses`: of a host, for the
    check; the connection then goes to that server.
    """
    asked: list[str] = []

    async def find(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["8.8.8.8"] if addresses is None else addresses(host)

    async def run() -> bytes:
        left = list(answers)
        requests: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(left.pop(0))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connect = asyncio.open_connection

        async def open_connection(host: str, _port: int, **options: object):
            assert is_public(host)
            if host in UNREACHABLE:
                raise ConnectionRefusedError
            options.pop("server_hostname")
            return await connect("127.0.0.1", port, **options)

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(source.asyncio, "open_connection", open_connection)
                return await fetch_image(url, most, find)
        finally:
            server.close()

    return asyncio.run(run()), asked


def answer(body: bytes = b"picture", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_picture_is_fetched():
    assert fetching("http://pictures.example/a.png?b=c", answer())[0] == b"picture"


def test_other_addresses_of_a_name_are_tried():
    addresses = [*UNREACHABLE, "8.8.8.8"]
    found, _ = fetching("http://pictures.example/a", answer(), addresses=lambda _: addresses)
    assert found == b"picture"
    with pytest.raises(FetchError, match="cannot be fetched"):
        fetching("http://pictures.example/a", answer(), addresses=lambda _: UNREACHABLE)


def test_redirects_are_followed_and_checked_again():
    moved = answer(b"", "302 Found", "Location: http://other.example/b")
    assert fetching("http://pictures.example/a", moved, answer()) == (
        b"picture",
        ["pictures.example", "other.example"],
    )

    def addresses(host: str) -> list[str]:
        return ["10.0.0.1"] if host == "other.example" else ["8.8.8.8"]

    with pytest.raises(FetchError, match="public Internet"):
        fetching("http://pictures.example/a", moved, addresses=addresses)


@pytest.mark.parametrize(
    "target", ["http://127.0.0.1/", "http://[::1]/", "http://2130706433/", "file:///etc/passwd"]
)
def test_a_redirect_to_the_inside_is_refused(target):
    moved = answer(b"", "302 Found", f"Location: {target}")

    def addresses(host: str) -> list[str]:
        return ["8.8.8.8"] if host == "pictures.example" else ["127.0.0.1"]

    with pytest.raises(FetchError):
        fetching("http://pictures.example/a", moved, addresses=addresses)


def test_a_name_with_one_address_inside_is_refused():
    with pytest.raises(FetchError, match="public Internet"):
        fetching("http://pictures.example/", addresses=lambda _: ["8.8.8.8", "127.0.0.1"])


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/", "http://localhost:80/", "http://[::ffff:127.0.0.1]/", "http://0x7f.1/"),
        *("http://0/", "http://127.1/", "http://[::]/"),
    ],
)
def test_names_of_this_machine_are_refused_before_a_connection(url):
    with pytest.raises(FetchError):
        asyncio.run(fetch_image(url, 1000))


@pytest.mark.parametrize("url", ["http://a:b@pictures.example/", "ftp://x/", "http:///x", "http://x:99999/"])
def test_other_urls_are_refused(url):
    with pytest.raises(FetchError):
        fetching(url, answer())


def test_answers_have_limits():
    with pytest.raises(FetchError, match="more than 1,000 bytes"):
        fetching("http://pictures.example/", answer(bytes(1001)))
    with pytest.raises(FetchError, match="status 404"):
        fetching("http://pictures.example/", answer(b"", "404 Not Found"))
    moved = answer(b"", "302 Found", "Location: /again")
    with pytest.raises(FetchError, match="more than 3 times"):
        fetching("http://pictures.example/", *[moved] * 5)
    with pytest.raises(FetchError):
        fetching("http://pictures.example/", b"garbage\r\n\r\n")
    with pytest.raises(FetchError):
        fetching("http://pictures.example/", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort")


def test_a_server_that_never_answers_ends_with_the_time_limit():
    async def never(_host: str, _port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    with pytest.raises(FetchError, match=r"did not give a complete image in time \(0\.05 s\)"):
        asyncio.run(fetch_image("http://pictures.example/", 1000, never, seconds=0.05))


def test_a_body_in_single_bytes_is_not_read_to_its_end():
    chunks = b"1\r\na\r\n" * 2 * source.MOST_PARTS
    body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    with pytest.raises(FetchError, match="too small parts"):
        fetching("http://pictures.example/", body, most=1_000_000)


async def test_other_tasks_run_while_a_body_arrives_in_small_parts(monkeypatch: pytest.MonkeyPatch):
    reader, turns = asyncio.StreamReader(), 0
    reader.feed_data(answer(bytes(1_000_000)))

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    connection = source.h11.Connection(source.h11.CLIENT)
    headers = [("Host", "x"), ("Connection", "close")]
    connection.send(source.h11.Request(method="GET", target="/", headers=headers))
    _, body = await source._receive(connection, reader, 1_000_000)
    counting.cancel()
    assert len(body) == 1_000_000
    assert turns > 50


def test_own_public_address_is_refused(monkeypatch: pytest.MonkeyPatch):
    assert is_own("127.0.0.1")
    assert not is_own("8.8.8.8")
    monkeypatch.setattr(source, "is_public", lambda _: True)
    with pytest.raises(FetchError, match="public Internet"):
        fetching("http://pictures.example/", answer(), addresses=lambda _: ["8.8.8.8", "127.0.0.1"])
