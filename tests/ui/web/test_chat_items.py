"""Presets and MCP servers of the chat over the admin API: kept for their owner, checked, without secrets."""

import os
import re
import signal
import sqlite3
from contextlib import closing

import httpx
import msgspec
import pytest

from llmbox.app.store.conversations import ChatToolServer
from support import mcp_server
from support.cli_box import PATIENCE, until
from support.pdf_files import pdf

PRESETS, SERVERS = "/admin/api/chat/presets", "/admin/api/chat/servers"


@pytest.fixture(scope="module")
def admin(panel):
    secret = panel.box.run("key", "add", "anna", "--scope", "admin", "--json").json["secret"]
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=panel.url, headers=headers, timeout=PATIENCE) as client:
        yield client


def problem(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_presets_are_saved_replaced_and_deleted_for_their_owner(panel, admin):
    preset = {"system": "Be brief.", "parameters": {"temperature": 0.2}, "schema": "{}"}
    assert admin.put(f"{PRESETS}/Short%20answers", json=preset).status_code == 200
    assert admin.put(f"{PRESETS}/Short%20answers", json={**preset, "system": "Briefer."}).status_code == 200
    found = admin.get(PRESETS).json()["presets"]
    assert found == {"Short answers": {**preset, "system": "Briefer."}}
    assert panel.box.api("chat/presets")["presets"] == {}
    assert "1 to 80" in problem(admin.put(f"{PRESETS}/%20", json=preset), 400)
    problem(admin.put(f"{PRESETS}/other", json={"unknown": 1}), 400)
    assert admin.delete(f"{PRESETS}/Short%20answers").status_code == 200
    problem(admin.delete(f"{PRESETS}/Short%20answers"), 404)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("Web", {"url": "http://127.0.0.1/mcp"}),
        ("web", {}),
        ("web", {"url": "http://127.0.0.1/mcp", "command": ["/bin/true"]}),
        ("web", {"url": "file:///etc/passwd"}),
        ("web", {"url": "http://name:word@host/mcp"}),
        ("web", {"url": "http://host:99999/mcp"}),
        ("web", {"url": "http://ho st/mcp"}),
        ("web", {"url": "http://host/mcp", "headers": {"Host": "other"}}),
        ("web", {"url": "http://host/mcp", "headers": {"X-A": "a\r\nX-B: b"}}),
        ("web", {"url": "http://host/mcp", "environment": {"A": "b"}}),
    ],
)
def test_bad_servers_are_refused_with_a_reason(admin, name, body):
    assert problem(admin.put(f"{SERVERS}/{name}", json=body), 400)
    assert admin.get(SERVERS).json()["servers"] == []


def test_programs_are_off_until_the_box_allows_them_and_need_a_yes(panel, admin):
    body = {"command": ["/bin/true"], "allowed": True}
    assert "llmbox config set server.mcp_commands true" in problem(admin.put(f"{SERVERS}/p", json=body), 403)
    session = panel.sign_in()
    page = session.get("/admin/settings").text
    assert re.search(r'name="server.mcp_commands"[^>]* disabled', page)
    for value, allowed in (("true", True), ("false", False)):
        assert panel.box.run("config", "set", "server.mcp_commands", value).code == 0
        os.kill(panel.box.running.pid, signal.SIGHUP)
        until(lambda allowed=allowed: admin.get(SERVERS).json()["commands_allowed"] is allowed)
        if allowed:
            assert "Confirm that /bin/true is to run as" in problem(admin.put(f"{SERVERS}/p", json=body), 400)
            assert admin.put(f"{SERVERS}/p", json={**body, "confirmed": True}).status_code == 200
    assert "config set" in problem(admin.post(f"{SERVERS}/p/tools", json={}), 403)
    assert admin.delete(f"{SERVERS}/p").status_code == 200


def test_a_secret_that_an_older_version_left_in_the_database_leaves_it(panel, admin):
    old = ChatToolServer(url="https://tools.test/mcp", headers={"Authorization": "Bearer secret"})
    assert admin.put(f"{SERVERS}/old", json={"url": old.url}).status_code == 200
    with closing(sqlite3.connect(panel.box.paths.request_db, timeout=PATIENCE)) as database, database:
        body = msgspec.json.encode(old).decode()
        database.execute("UPDATE panel_item SET body = ? WHERE name = 'old'", (body,))
    (listed,) = [each for each in admin.get(SERVERS).json()["servers"] if each["name"] == "old"]
    assert listed["headers"] == ["Authorization"]
    with closing(sqlite3.connect(panel.box.paths.request_db, timeout=PATIENCE)) as database:
        ((left,),) = database.execute("SELECT body FROM panel_item WHERE name = 'old'")
    assert "secret" not in left
    assert b"Bearer secret" in panel.box.paths.mcp_secrets_file.read_bytes()
    assert admin.delete(f"{SERVERS}/old").status_code == 200
    assert not panel.box.paths.mcp_secrets_file.exists()


def test_a_server_is_used_once_allowed_and_its_header_is_never_shown(panel, admin):
    with mcp_server.serve_http() as server:
        body = {"url": server.url, "headers": {"Authorization": "Bearer secret"}}
        made = admin.put(f"{SERVERS}/web", json=body)
        kept = panel.box.paths.mcp_secrets_file
        assert b"Bearer secret" in kept.read_bytes()
        assert made.json()["host"] == f"127.0.0.1:{server.server_port}"
        assert "secret" not in made.text + admin.get(SERVERS).text
        assert "not allowed" in problem(admin.post(f"{SERVERS}/web/tools", json={}), 403)
        changed = admin.post(f"{SERVERS}/web", json={"allowed": True, "trust": {"echo": True, "fail": True}})
        assert changed.json()["trusted"] == ["echo", "fail"]
        changed = admin.post(f"{SERVERS}/web", json={"trust": {"fail": False}})
        assert changed.json()["trusted"] == ["echo"]
        tools = admin.post(f"{SERVERS}/web/tools", json={}).json()["tools"]
        assert [tool["name"] for tool in tools] == list(mcp_server.TOOLS)
        call = {"tool": "echo", "arguments": {"text": "a"}}
        answer = admin.post(f"{SERVERS}/web/call", json=call).json()
        assert '{"text": "a"}' in answer["text"]
        problem(admin.post(f"{SERVERS}/web/call", json={"tool": "none"}), 404)
    assert "The MCP server web failed" in problem(admin.post(f"{SERVERS}/web/call", json=call), 502)
    assert panel.box.api("chat/servers")["servers"] == []
    assert panel.box.run("key", "rm", "anna", "--yes").code == 0
    assert not kept.exists()  # the key is gone, and with it what was its
    files = [file for file in panel.box.paths.data_dir.rglob("*") if file.is_file()]
    assert any(file.name.startswith("requests.db") for file in files)
    assert not any(b"Bearer secret" in file.read_bytes() for file in files)


def test_a_pdf_is_read_on_this_box_and_a_bad_one_says_why(panel):
    with closing(panel.sign_in()) as session:
        csrf = re.search(r'data-csrf="([^"]+)"', session.get("/admin/chat").text)[1]

        def send(body: bytes, kind: str = "application/pdf") -> httpx.Response:
            headers = {"Content-Type": kind, "X-CSRF-Token": csrf}
            return session.post("/admin/api/chat/pdf", content=body, headers=headers)

        read = send(pdf("Mombasa", "Nairobi")).json()
        assert read == {"pages": 2, "read_pages": 2, "text": "Mombasa\n\nNairobi"}
        assert "cannot be read" in problem(send(b"%PDF-1.4 nothing"), 400)
        assert "holds no text" in problem(send(pdf("")), 400)
        problem(send(pdf("a"), "text/plain"), 415)
        problem(send(b"%" * 20_000_001), 413)
    assert httpx.post(f"{panel.url}/admin/api/chat/pdf", content=b"%", timeout=PATIENCE).status_code in {
        401,
        415,
    }
