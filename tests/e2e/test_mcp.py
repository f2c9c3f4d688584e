"""llmbox's MCP server, driven by the official client over stdio and HTTP, and its limits by hand."""

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import httpx2
import pytest

from llmbox.app.mcp.tools import TOOLS
from support.cli_box import PATIENCE, Box, box
from support.deferred_module import DeferredModule
from support.panel_box import panel

mcp = DeferredModule("mcp")

__all__ = ["box", "panel"]
pytestmark = pytest.mark.slow

INFER = {"list_models", "list_requests", "ask_model"}


@asynccontextmanager
async def over_http(panel, secret: str | None, mode: str = "auto"):
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=PATIENCE) as http,
        mcp.Client(streamable_http_client(f"{panel.url}/mcp", http_client=http), mode=mode) as client,
    ):
        yield client


@asynccontextmanager
async def over_stdio(box: Box):
    command = box.command("mcp")
    parameters = mcp.StdioServerParameters(command=command[0], args=command[1:], env=box.environ)
    async with mcp.Client(mcp.stdio_client(parameters, sys.__stderr__)) as client:
        yield client


async def names(client: "mcp.Client") -> set[str]:
    return {tool.name for tool in (await client.list_tools()).tools}


def test_ctrl_c_ends_it_quietly(box: Box):
    """A thread that holds the lock of stdin would make the interpreter abort."""
    child = subprocess.Popen(
        box.command("mcp"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=box.environ,
    )
    child.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
    child.stdin.flush()
    assert json.loads(child.stdout.readline())["id"] == 1
    child.send_signal(signal.SIGINT)
    assert (child.wait(PATIENCE), child.stderr.read().strip()) == (130, b"")
    child.stdin.close()


def text(result) -> str:
    return result.content[0].text


def key(panel, name: str, scope: str) -> str:
    return panel.box.run("key", "add", name, "--scope", scope, "--json").json["secret"]


def post(panel, body: object, **headers: str) -> httpx.Response:
    return httpx.post(f"{panel.url}/mcp", json=body, headers=headers, timeout=PATIENCE)


PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_an_assistant_finds_pulls_asks_and_unloads_a_model(panel, transport):
    async with asyncio.timeout(2 * PATIENCE):
        if transport == "http":
            opened = over_http(panel, key(panel, "boss", "admin"), "legacy")
        else:
            opened = over_stdio(panel.box)
        async with opened as client:
            assert client.server_info.name == "llmbox"
            assert await names(client) == set(TOOLS)
            settings = json.loads((await client.read_resource("llmbox://settings")).contents[0].text)
            assert settings["server.host"]["value"] == "127.0.0.1"
            seen = []

            async def progress(done, total, message):
                seen.append((done, total, message))

            fit = await client.call_tool("check_fit", {"model": "org/little"})
            assert fit.structured_content["fits"] is True
            pulled = await client.call_tool(
                "pull_model", {"model": "org/little", "wait_s": PATIENCE}, progress_callback=progress
            )
            assert pulled.structured_content["download"]["state"] == "ready", text(pulled)
            assert seen
            on_disk = await client.call_tool("models_on_disk")
            assert "org/little" in text(on_disk)
            loaded = await client.call_tool("load_model", {"model": "org/none"})
            assert loaded.is_error
            assert "org/none" in text(loaded)
            answer = await client.call_tool("ask_model", {"model": "tiny", "prompt": "Hi", "max_tokens": 4})
            assert answer.structured_content["usage"]["completion_tokens"] == 4
            running = await client.call_tool("running_models")
            assert {"tiny"} <= {each["name"] for each in running.structured_content["models"]}
            for tool in ("list_models", "recommended_models", "list_downloads", "get_stats", "list_requests"):
                assert not (await client.call_tool(tool)).is_error
            assert "llmbox_" in text(await client.call_tool("get_metrics"))
            nothing = await client.call_tool("unload_model", {"model": "unknown"})
            assert nothing.is_error


async def test_an_inference_key_has_the_tools_of_its_scope_and_its_own_requests(panel):
    panel.complete()
    secret = key(panel, "phone", "infer")
    async with asyncio.timeout(PATIENCE), over_http(panel, secret) as client:
        assert await names(client) == INFER
        asked = await client.call_tool("ask_model", {"model": "tiny", "prompt": "Hi", "max_tokens": 2})
        assert not asked.is_error
        rows: list = []
        while not rows:  # its row is written after the answer
            rows = (await client.call_tool("list_requests")).structured_content["requests"]
        assert {row["key"] for row in rows} == {"phone"}
        refused = await client.call_tool("get_stats")
        assert refused.is_error
        assert "--scope admin" in text(refused)
        read = await client.read_resource("llmbox://requests")
        assert {row["key"] for row in json.loads(read.contents[0].text)["requests"]} == {"phone"}
        uris = {str(each.uri) for each in (await client.list_resources()).resources}
        assert {"llmbox://models", "llmbox://requests", "llmbox://docs/mcp"} <= uris
        assert "llmbox://settings" not in uris
    async with asyncio.timeout(PATIENCE), over_http(panel, None) as client:
        assert await names(client) == {"list_models", "ask_model", "get_metrics"}


def test_sessions_versions_pages_and_batches_are_checked(panel):
    assert post(panel, PING).json() == {"jsonrpc": "2.0", "id": 1, "result": {}}
    assert post(panel, [PING]).status_code == 400
    assert post(panel, PING, **{"MCP-Protocol-Version": "1999-01-01"}).status_code == 400
    assert post(panel, PING, Origin="https://elsewhere.example").status_code == 403
    assert post(panel, PING, Host="elsewhere.example").status_code == 421
    assert post(panel, PING, **{"Mcp-Session-Id": "unknown"}).status_code == 404
    assert post(panel, {"jsonrpc": "2.0", "method": "notifications/initialized"}).status_code == 202
    assert httpx.get(f"{panel.url}/mcp", timeout=PATIENCE).status_code == 405
    begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
    session = {"Mcp-Session-Id": post(panel, begin).headers["mcp-session-id"]}
    assert post(panel, PING, **session).status_code == 200
    other = {"Authorization": f"Bearer {key(panel, 'other', 'infer')}", **session}
    assert post(panel, PING, **other).status_code == 404
    assert httpx.delete(f"{panel.url}/mcp", headers=session, timeout=PATIENCE).status_code == 204
    assert post(panel, PING, **session).status_code == 404


def test_the_printed_entry_starts_the_server_of_this_box(tmp_path):
    box = Box(tmp_path)
    entry = box.run("mcp", "--print", PATH="").json["mcpServers"]["llmbox"]
    assert entry["args"][-3:] == ["mcp", "--data-dir", str(box.paths.data_dir)]
    done = subprocess.run(
        [entry["command"], *entry["args"]],
        input=b'{"jsonrpc":"2.0","id":7,"method":"ping"}\n[]\n',
        capture_output=True,
        env=box.environ,
        timeout=PATIENCE,
    )
    answers = sorted(done.stdout.splitlines())
    assert [json.loads(line)["id"] for line in answers] == [7, None]


async def test_without_a_daemon_the_tools_say_how_to_start_one(tmp_path):
    async with asyncio.timeout(PATIENCE), over_stdio(Box(tmp_path)) as client:
        assert await names(client) == set(TOOLS)
        result = await client.call_tool("running_models")
        assert result.is_error
        assert "llmbox up" in text(result)
