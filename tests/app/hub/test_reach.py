"""What keeps a hub from being reached is known before its client begins to try."""

import socket
import threading
from typing import Any

import pytest

from llmbox.app.hub import http as reach
from llmbox.app.hub.errors import HubError
from llmbox.app.hub.http import require_reachable


def test_a_resolver_that_hangs_is_named_and_left(monkeypatch: pytest.MonkeyPatch):
    hangs, told = threading.Event(), []
    monkeypatch.setattr(reach, "TELL_S", 0.01)
    monkeypatch.setattr(reach, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [hangs.wait(60)][1:])
    with pytest.raises(HubError, match=r"looking up hub\.example took longer"):
        require_reachable("https://hub.example", told.append)
    hangs.set()
    assert told == ["https://hub.example: looking up hub.example…"]


def test_a_second_address_is_tried(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        kinds = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        found = [(*kinds, ("127.0.0.1", 9)), (*kinds, ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        require_reachable("http://hub.example", pytest.fail)


def test_a_proxy_is_what_has_to_be_reached(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def resolve(host: str, port: int, **_: Any) -> None:
        asked.append((host, port))
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    with pytest.raises(HubError, match=r"proxy\.example cannot be resolved .* \(the proxy of HTTPS_PROXY\)"):
        require_reachable("https://hub.example", pytest.fail)
    with pytest.raises(HubError, match=r"inside\.example cannot be resolved"):
        require_reachable("https://inside.example", pytest.fail)
    assert asked == [("proxy.example", 3128), ("inside.example", 443)]


def test_odd_names():
    for endpoint in ("http://" + "a" * 70 + ".example", "http://"):
        with pytest.raises(HubError):
            require_reachable(endpoint, pytest.fail)
