"""Newer versions: which index is asked, what its answers mean, and the command that upgrades."""

import base64
import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmbox import __version__
from llmbox.app.cli.root import run
from llmbox.app.diagnostics import updates
from llmbox.app.diagnostics.updates import (
    add_package_command,
    check_for_update,
    index_url,
    newest_release,
    upgrade_command,
)
from llmbox.app.errors import CliError, Exit
from llmbox.app.lifecycle.program import Program

NEWER = [
    "llmbox-0.0.9.tar.gz",
    "llmbox-9.10.0-py3-none-any.whl",
    "llmbox-9.9.tar.gz",
    "llmbox-10.0rc1.tar.gz",
]


@pytest.fixture
def index():
    """A package index on loopback: `pages` by path, `asked` has the headers of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(dict(self.headers))
            kind, body = self.server.pages.get(self.path, ("", ""))
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.pages, server.asked = {}, []
    server.url = f"http://127.0.0.1:{server.server_port}/simple"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def as_json(*files):
    return "application/vnd.pypi.simple.v1+json", json.dumps(
        {"files": [{"filename": name} for name in files]}
    )


def as_html(*files):
    return "text/html", "<!doctype html>" + "".join(f'<a href="../{f}#sha256=0">{f}</a><br>' for f in files)


@pytest.mark.parametrize("write", [as_json, as_html])
def test_the_newest_release_is_told_with_the_command_that_installs_it(index, write):
    index.pages["/simple/llmbox/"] = write(*NEWER)
    found = check_for_update({"PIP_INDEX_URL": index.url})
    assert (found.installed, found.latest, found.is_newer) == (__version__, "9.10.0", True)
    assert (found.command, found.index) == (upgrade_command(), index.url)
    assert "llmbox" not in index.asked[0].get("User-Agent", "")  # nothing says who asks


def test_the_installed_version_may_be_the_newest(index):
    index.pages["/simple/llmbox/"] = as_json(f"llmbox-{__version__}.tar.gz")
    assert not check_for_update({"PIP_INDEX_URL": index.url}).is_newer


def test_a_password_goes_to_the_index_and_is_not_shown(index):
    index.pages["/simple/llmbox/"] = as_json(*NEWER)
    url = index.url.replace("//", "//me:se%40cret@")
    assert check_for_update({"PIP_INDEX_URL": url}).index == index.url
    assert base64.b64decode(index.asked[0]["Authorization"].split()[1]) == b"me:se@cret"
    index.pages.clear()
    with pytest.raises(CliError) as raised:
        check_for_update({"PIP_INDEX_URL": url})
    assert "cret" not in str(raised.value.what + raised.value.why)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"PIP_INDEX_URL": "http://127.0.0.1:1/simple"}, "refused"),
        ({"PIP_INDEX_URL": "file:///simple"}, "not an http or https URL"),
        ({"PIP_INDEX_URL": "http://[bad/simple"}, ""),
        ({"PIP_INDEX_URL": "http://127.0.0.1:1/a b"}, "control characters"),
    ],
)
def test_without_the_index_there_is_a_clear_error(environ, why):
    with pytest.raises(CliError) as raised:
        check_for_update(environ)
    assert raised.value.exit == Exit.UNREACHABLE
    assert why in raised.value.why
    assert raised.value.fix


@pytest.mark.parametrize("page", ["", "[]", "{}", "<html></html>", '{"files": [{}]}', '{"files": 7}'])
def test_a_page_without_a_release_is_told(page):
    with pytest.raises(CliError, match="cannot ask"):
        newest_release(page, "http://127.0.0.1/simple")


def test_yanked_files_are_no_release():
    page = {
        "files": [{"filename": "llmbox-9.0.tar.gz", "yanked": "broken"}, {"filename": "llmbox-8.0.tar.gz"}]
    }
    assert newest_release(json.dumps(page), "http://127.0.0.1") == "8.0"


@pytest.mark.parametrize("mark", ["data-yanked", 'data-yanked=""', 'data-yanked="broken: a &gt; b"'])
def test_links_to_yanked_files_are_no_release(mark):
    _, page = as_html("llmbox-8.0.tar.gz")
    page += f'<a href="../a" {mark}>llmbox-9.0.tar.gz</a> <a {mark} href="../b">llmbox-9.1.tar.gz</a>'
    assert newest_release(page, "http://127.0.0.1") == "8.0"


@pytest.mark.parametrize(
    "answer", [b"not http\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n<a"]
)
def test_an_answer_that_is_no_http_is_a_clear_error(answer):
    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(CliError) as raised:
            check_for_update({"PIP_INDEX_URL": f"http://127.0.0.1:{listener.getsockname()[1]}/simple"})
        thread.join(10)
    assert raised.value.exit == Exit.UNREACHABLE
    assert raised.value.why


@pytest.mark.parametrize("url", ["", "https://pypi.org/simple", "https://name:secret@PyPI.org./simple/"])
def test_the_package_of_the_same_name_on_pypi_is_never_offered(url, tmp_path, monkeypatch):
    """It is by other people: upgrading to it would replace llmbox and run their code."""
    asked = []
    monkeypatch.setattr(updates, "_fetch", asked.append)
    monkeypatch.setattr(updates, "_pip_files", lambda _environ: iter(()))
    with pytest.raises(CliError) as raised:
        check_for_update({"HOME": str(tmp_path), "PIP_INDEX_URL": url})
    assert asked == []
    assert "another program" in raised.value.why
    assert "PIP_INDEX_URL=URL" in raised.value.fix
    assert "secret" not in str(raised.value.fix + raised.value.why)


def test_the_index_is_that_of_pip_and_uv(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    home = {"HOME": str(tmp_path)}
    user = tmp_path / ".config" / "pip" / "pip.conf"
    user.parent.mkdir(parents=True)
    user.write_text("[global]\nindex-url = http://127.0.0.1/user\n")
    assert index_url(home) == "http://127.0.0.1/user"
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "pip.conf").write_text("[install]\nindex-url = http://127.0.0.1/env\n")
    assert index_url(home) == "http://127.0.0.1/env"
    named = tmp_path / "named.conf"
    named.write_text("[global]\nindex-url: http://127.0.0.1/named\n")
    assert index_url({**home, "PIP_CONFIG_FILE": str(named)}) == "http://127.0.0.1/named"
    assert index_url({**home, "UV_DEFAULT_INDEX": "own=http://127.0.0.1/uv"}) == "http://127.0.0.1/uv"
    assert index_url({**home, "PIP_INDEX_URL": "http://127.0.0.1/pip"}) == "http://127.0.0.1/pip"
    named.write_text("not a file of pip\n")
    assert index_url({**home, "PIP_CONFIG_FILE": str(named)}) == "http://127.0.0.1/env"


@pytest.mark.parametrize(
    ("marker", "upgrade", "add"),
    [
        ("pipx_metadata.json", "pipx upgrade llmbox", "pipx inject llmbox segno"),
        ("uv-receipt.toml", "uv tool upgrade llmbox", "uv tool install llmbox --with segno"),
        (
            "other",
            f"{sys.executable} -m pip install --upgrade llmbox",
            f"{sys.executable} -m pip install segno",
        ),
    ],
)
def test_the_command_is_that_of_the_tool_that_installed_it(tmp_path, monkeypatch, marker, upgrade, add):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(updates, "_source_folder", lambda: "")
    (tmp_path / marker).touch()
    assert (upgrade_command(), add_package_command("segno")) == (upgrade, add)


def test_an_environment_without_pip_is_uvs(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(updates, "_source_folder", lambda: "")
    monkeypatch.setattr(updates, "_has_pip", lambda: False)
    (tmp_path / "pyvenv.cfg").touch()
    assert upgrade_command() == f"uv pip install --python {sys.executable} --upgrade llmbox"


def test_a_package_of_the_system_and_a_checkout(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/opt/llmbox")
    assert upgrade_command().startswith("sudo ")
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(updates, "_source_folder", lambda: "/src/a b")
    assert upgrade_command() == "git -C '/src/a b' pull"


def test_the_command_line_asks_only_when_told_to(index, tmp_path, capsys):
    index.pages["/simple/llmbox/"] = as_json(*NEWER)
    program = Program(environ={"PIP_INDEX_URL": index.url})
    place = ["--data-dir", str(tmp_path)]
    assert run([*place, "version"], program) == 0
    assert run([*place, "version", "--json"], program) == 0
    assert index.asked == []
    capsys.readouterr()
    assert run([*place, "version", "--check"], program) == 0
    assert "llmbox 9.10.0 is available" in capsys.readouterr().out
    assert run([*place, "version", "--check", "--json"], program) == 0
    assert json.loads(capsys.readouterr().out)["update"]["is_newer"] is True
    assert len(index.asked) == 2
    assert list(Path(tmp_path).iterdir()) == []
