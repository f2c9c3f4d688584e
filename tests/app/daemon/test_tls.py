"""HTTPS: certificates made here and brought along, what clients see, and files that do not serve."""

import asyncio
import http.client
import json
import ssl
import stat
import urllib.error
import urllib.request

import pytest
from cryptography import x509

from llmbox.app.config.paths import find_paths
from llmbox.app.config.settings import ServerSettings
from llmbox.app.daemon.network import machine_names, open_tls, self_made_certificate
from llmbox.app.errors import CliError
from support.cli_box import box  # noqa: F401 - a fixture

NAMES = ["localhost", "127.0.0.1", "::1"]


@pytest.fixture
def made(tmp_path):
    return self_made_certificate(tmp_path / "made", NAMES)


def test_plain_http_needs_no_files(tmp_path):
    assert open_tls(ServerSettings(), find_paths(tmp_path)) is None
    assert not list(tmp_path.iterdir())


def test_a_self_made_certificate_is_kept_until_a_name_is_new(made):
    certificate, key = made
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    first = certificate.read_bytes()
    assert self_made_certificate(certificate.parent, NAMES) == made
    assert certificate.read_bytes() == first
    self_made_certificate(certificate.parent, [*NAMES, "192.0.2.7"])
    names = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    addresses = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "192.0.2.7" in {str(each) for each in addresses.get_values_for_type(x509.IPAddress)}


def test_a_certificate_that_expires_soon_is_replaced(made, monkeypatch):
    certificate, _ = made
    first = certificate.read_bytes()
    left = x509.load_pem_x509_certificate(first).not_valid_after_utc
    monkeypatch.setattr("llmbox.app.daemon.network._RENEWED", left - left.replace(year=left.year - 3))
    self_made_certificate(certificate.parent, NAMES)
    assert certificate.read_bytes() != first


def test_names_of_the_machine_hold_no_wildcard_address(tmp_path):
    certificate, _ = self_made_certificate(tmp_path, machine_names("0.0.0.0"))
    assert b"CERTIFICATE" in certificate.read_bytes()


def test_a_host_name_with_a_domain_is_also_known_as_mdns_announces_it(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "box.example.net")
    names = machine_names("0.0.0.0")
    assert {"box.local", "box.example.net", "box.example.net.local"} <= set(names)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tls_certificate": "{certificate}"}, "server.tls_key is not set"),
        ({"tls_key": "{key}"}, "server.tls_certificate is not set"),
        ({"tls_certificate": "{folder}/none.pem", "tls_key": "{key}"}, "none.pem"),
        ({"tls_certificate": "{key}", "tls_key": "{certificate}"}, "cannot use the certificate"),
        ({"tls_certificate": "{certificate}", "tls_key": "{other}"}, "cannot use the certificate"),
    ],
)
def test_files_that_do_not_serve_are_told(made, tmp_path, given, told):
    certificate, key = made
    _, other = self_made_certificate(tmp_path / "other", NAMES)
    places = {"certificate": certificate, "key": key, "other": other, "folder": tmp_path}
    settings = {name: text.format(**places) for name, text in given.items()}
    with pytest.raises(CliError, match=told):
        open_tls(ServerSettings(tls=True, **settings), find_paths(tmp_path))


async def test_plain_http_on_the_port_of_https_is_told_so_and_other_bytes_are_not(tmp_path):
    tls = open_tls(ServerSettings(tls=True), find_paths(tmp_path))
    assert tls is not None
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=tls.context)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: box\r\ncontent-length: 9\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b'{"n": 1}\n')  # a body that was on its way does not end the connection before its answer
    await writer.drain()
    assert head.startswith(b"HTTP/1.1 400 ")
    body = await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
    assert json.loads(body)["error"]["code"] == "https_required"
    writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"\0" * 64)
    assert await reader.read() == b""
    writer.close()
    server.close()


def test_up_with_tls_answers_https_alone_and_the_commands_need_no_certificate(box):  # noqa: F811
    told = box.run("up", box.model(), "--tls", "--json").json
    assert told["url"].startswith("https://127.0.0.1:")
    certificate = box.paths.tls_dir / "certificate.pem"
    trusting = ssl.create_default_context(cafile=str(certificate))
    with urllib.request.urlopen(f"{told['url']}/models", context=trusting, timeout=60) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{told['url']}/models", timeout=60)
    plain = http.client.HTTPConnection("127.0.0.1", told["port"], timeout=60)
    plain.request("GET", "/health")
    answer = plain.getresponse()
    assert (answer.status, answer.getheader("connection")) == (400, "close")
    assert "https://" in json.loads(answer.read())["error"]["message"]
    plain.close()
    assert box.run("status", "--quiet").code == 0
    assert f'SSL_CERT_FILE="{certificate}"' in box.run("connect", "openai", "--quiet").out
