"""The caller's address behind proxies, and nothing believed from anybody else."""

import logging
from pathlib import Path
from typing import Any

import pytest

from llmbox.app.http.server.server import ForwardedClientMiddleware, TrustedProxies
from support.http_app import guarded, make_app
from support.http_server import running


class Peers:
    """An application that remembers who it was called by."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("chain", "client"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("6.6.6.6, 203.0.113.7", "203.0.113.7"),
        ("6.6.6.6, 203.0.113.7, 10.0.0.9", "203.0.113.7"),
        ("10.0.0.9", "10.0.0.9"),
        ("2001:db8::7", "2001:db8::7"),
        ("text of the caller's choice", "10.0.0.1"),
        ("text, 10.0.0.9", "10.0.0.9"),
        ("", "10.0.0.1"),
        ("203.0.113.7:1234", "10.0.0.1"),
    ],
)
def test_the_caller_is_the_last_address_that_is_no_proxy(chain: str, client: str) -> None:
    assert TrustedProxies(["10.0.0.0/8"]).find_client("10.0.0.1", chain) == client


async def test_only_trusted_proxies_are_believed() -> None:
    peers = Peers()
    app = ForwardedClientMiddleware(peers, TrustedProxies(["10.0.0.1"]))

    async def ignore(_message: Any) -> None:
        return

    for peer in ("10.0.0.1", "10.0.0.2"):
        headers = [(b"x-forwarded-for", b"6.6.6.6"), (b"x-forwarded-for", b"203.0.113.7")]
        await app({"client": (peer, 1), "headers": headers}, None, ignore)
    assert peers.seen == ["203.0.113.7", "10.0.0.2"]


@pytest.mark.parametrize(("proxies", "client"), [((), "127.0.0.1"), (("127.0.0.1",), "203.0.113.7")])
async def test_local_processes_are_not_believed_unless_configured(
    proxies: tuple[str, ...], client: str
) -> None:
    peers = Peers()
    async with running(app=peers, trusted_proxies=proxies) as server:
        await server.send(server.get("/", "X-Forwarded-For: 203.0.113.7", "Connection: close"))
    assert peers.seen == [client]


async def test_guesses_at_a_sign_in_count_for_the_real_address(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Whoever guesses cannot get a new name with each guess, nor write into the log."""
    body = "token=guess"
    answers = []
    with caplog.at_level(logging.WARNING, "llmbox.security"):
        async with running(app=make_app([], guarded(tmp_path))) as server:
            for number in range(7):
                head = [
                    "POST /admin/signin HTTP/1.1",
                    f"Host: localhost:{server.port}",
                    f"X-Forwarded-For: root logged in {number}",
                    "Content-Type: application/x-www-form-urlencoded",
                    f"Content-Length: {len(body)}",
                    "Connection: close",
                ]
                answers.append(await server.send("\r\n".join([*head, "", body]).encode()))
    assert [answer.split()[1] for answer in answers] == [b"401"] * 5 + [b"429"] * 2
    assert "root logged in" not in caplog.text
    assert "127.0.0.1" in caplog.text
