"""Announcement by mDNS: only where it was asked for, withdrawn at the end; no failure stops the daemon."""

import asyncio
import logging
import socket
from types import SimpleNamespace

import pytest
import zeroconf
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from llmbox.app.config.settings import ServerSettings
from llmbox.app.daemon import network
from llmbox.app.daemon.network import Announcement, announced_addresses
from llmbox.app.lifecycle.instance import RunningDaemon


def daemon(host="0.0.0.0", certificate="/c.pem"):
    return RunningDaemon(
        pid=1,
        host=host,
        port=7411,
        socket="/s",
        started_at=0.0,
        version="1.2.3",
        certificate=certificate,
    )


class FakeNetwork:
    """A zeroconf that only takes notes."""

    def __init__(self, monkeypatch, error=None):
        self.calls, self.info, self.error = [], None, error
        monkeypatch.setattr(
            network, "import_module", lambda name: self if name.endswith("asyncio") else zeroconf
        )

    def AsyncZeroconf(self, interfaces):  # noqa: N802 - the name in zeroconf
        self.calls.append("open")
        assert all(not each.startswith("127.") for each in interfaces)
        return self

    async def async_register_service(self, info, *, allow_name_change):
        if self.error:
            raise self.error
        self.info = info
        self.calls.append("register")
        return asyncio.sleep(0)

    async def async_unregister_all_services(self):
        self.calls.append("unregister")

    async def async_close(self):
        self.calls.append("close")


async def live(settings, running):
    subject = Announcement(settings, running)
    subject.start()
    for _ in range(5):
        await asyncio.sleep(0)
    await subject.withdraw()


@pytest.mark.parametrize(
    "settings",
    [ServerSettings(host="0.0.0.0"), ServerSettings(mdns=True), ServerSettings(mdns=True, host="::1")],
)
async def test_nothing_is_announced_unless_asked_for_and_reachable(monkeypatch, settings):
    network = FakeNetwork(monkeypatch)
    await live(settings, daemon(settings.host))
    assert network.calls == []


@pytest.mark.parametrize(
    ("certificate", "kind"), [("", "_http._tcp.local."), ("/c.pem", "_https._tcp.local.")]
)
async def test_the_record_names_the_machine_and_goes_with_the_daemon(monkeypatch, certificate, kind):
    network = FakeNetwork(monkeypatch)
    await live(ServerSettings(mdns=True, host="192.0.2.7"), daemon("192.0.2.7", certificate))
    assert network.calls == ["open", "register", "unregister", "close"]
    machine = socket.gethostname().partition(".")[0]
    assert network.info.name == f"llmbox on {machine}.{kind}"
    assert (network.info.type, network.info.port) == (kind, 7411)
    assert network.info.parsed_addresses() == ["192.0.2.7"]
    assert network.info.properties[b"path"] == b"/admin"


async def test_a_network_that_fails_is_a_line_in_the_log(monkeypatch, caplog):
    network = FakeNetwork(monkeypatch, OSError("no multicast here"))
    with caplog.at_level(logging.WARNING, "llmbox.daemon"):
        await live(ServerSettings(mdns=True, host="192.0.2.7"), daemon("192.0.2.7"))
    assert "no multicast here" in caplog.text
    assert network.calls[-1] == "close"


async def test_a_missing_package_is_a_line_in_the_log(monkeypatch, caplog):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(network, "import_module", missing)
    await live(ServerSettings(mdns=True, host="192.0.2.7"), daemon())
    assert "zeroconf is not installed" in caplog.text


def test_addresses_of_bridges_are_not_announced(monkeypatch):
    ends = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "veth1f": "192.0.2.9", "eth0": "192.0.2.7"}
    there = {name: [SimpleNamespace(family=socket.AF_INET, address=end)] for name, end in ends.items()}
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: there)
    assert announced_addresses("0.0.0.0") == ["192.0.2.7"]
    assert announced_addresses("172.17.0.1") == ["172.17.0.1"]  # the owner's choice


def test_addresses_are_those_that_others_can_use():
    assert announced_addresses("192.0.2.7") == ["192.0.2.7"]
    assert not any(each.startswith(("127.", "169.254.")) for each in announced_addresses("0.0.0.0"))


async def test_others_see_the_record_and_its_end(monkeypatch):
    """Real multicast, on loopback alone; skipped where loopback has none."""
    monkeypatch.setattr(network, "announced_addresses", lambda _: ["127.0.0.1"])
    try:
        other = AsyncZeroconf(interfaces=["127.0.0.1"])
    except OSError as error:
        pytest.skip(f"no multicast on loopback: {error}")
    subject = Announcement(ServerSettings(mdns=True, host="192.0.2.7"), daemon("192.0.2.7", ""))
    try:
        subject.start()
        async with asyncio.timeout(60):
            await asyncio.wait({subject._task})
            name = f"llmbox on {socket.gethostname().partition('.')[0]}._http._tcp.local."
            seen = AsyncServiceInfo("_http._tcp.local.", name)
            if not await seen.async_request(other.zeroconf, 3000):
                pytest.skip("multicast on loopback brings nothing")
            assert (seen.port, seen.parsed_addresses()) == (7411, ["127.0.0.1"])
    finally:
        await subject.withdraw()
        await other.async_close()
