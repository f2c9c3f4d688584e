import socket
from pathlib import Path

import pytest

from llmbox.app.daemon.listen import open_sockets, require_loopback
from llmbox.app.errors import CliError, Exit
from llmbox.app.paths import find_paths
from llmbox.app.settings import ServerSettings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_is_allowed(host: str):
    require_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "8.8.8.8"])
def test_other_addresses_are_refused_with_a_way_out(host: str):
    with pytest.raises(CliError, match="refusing to listen") as caught:
        require_loopback(host)
    assert caught.value.exit == Exit.DENIED
    assert "ssh -L" in caught.value.fix


def test_a_name_is_no_bind_address():
    with pytest.raises(CliError) as caught:
        require_loopback("example.org")
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
