import socket
from pathlib import Path

import pytest

from llmbox.app.config.paths import find_paths
from llmbox.app.config.settings import ServerSettings
from llmbox.app.daemon.run import check_bind, open_sockets
from llmbox.app.errors import CliError, Exit
from llmbox.app.security.key_store import KeyStore
from llmbox.app.security.keys import KeySpec


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_is_allowed(host: str, tmp_path: Path):
    check_bind(host, KeyStore(tmp_path / "keys.json"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "8.8.8.8"])
def test_other_addresses_need_a_key(host: str, tmp_path: Path):
    keys = KeyStore(tmp_path / "keys.json")
    keys.add(KeySpec(name="old", expires=1.0))
    with pytest.raises(CliError, match="refusing to listen") as caught:
        check_bind(host, keys)
    assert caught.value.exit == Exit.DENIED
    assert "llmbox key add" in caught.value.fix
    assert "ssh -L" in caught.value.fix
    keys.add(KeySpec(name="good"))
    check_bind(host, keys)


def test_a_broken_key_file_stops_the_start(tmp_path: Path):
    file = tmp_path / "keys.json"
    file.write_text("{")
    with pytest.raises(CliError, match="the key file cannot be read"):
        check_bind("127.0.0.1", KeyStore(file))


def test_a_name_is_no_bind_address(tmp_path: Path):
    with pytest.raises(CliError) as caught:
        check_bind("example.org", KeyStore(tmp_path / "keys.json"))
    assert caught.value.exit == Exit.USAGE


def test_a_port_in_use_is_exit_9_and_names_the_holder(tmp_path: Path):
    paths = find_paths(tmp_path)
    paths.create()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(CliError) as caught:
            open_sockets(ServerSettings(port=port), paths)
    assert caught.value.exit == Exit.CONFLICT
    assert str(port) in caught.value.what


def test_the_unix_socket_is_private_and_may_have_a_long_path(tmp_path: Path):
    paths = find_paths(tmp_path / ("x" * 100))
    paths.create()
    tcp, unix = open_sockets(ServerSettings(port=0), paths)
    try:
        assert paths.socket_file.stat().st_mode & 0o077 == 0
        assert len({listener.getsockname()[1] for listener in tcp}) == 1
    finally:
        for listener in (*tcp, unix):
            listener.close()
