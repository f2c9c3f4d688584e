"""The chat's client of MCP servers: programs and URLs, their errors, and that nothing is left behind."""

import asyncio
import os
import sys

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.mcp import client as mcp_client
from llmbox.app.mcp.channels import StdioChannel
from llmbox.app.mcp.client import McpClients
from llmbox.app.store.conversations import ChatToolServer
from support import mcp_server

pytestmark = pytest.mark.process
PROGRAM = ChatToolServer(
    command=[sys.executable, mcp_server.__file__], environment={"GREETING": "x"}, allowed=True
)
PATIENCE = 60


@pytest.fixture
async def clients():
    made = McpClients()
    yield made
    await asyncio.wait_for(made.close(), PATIENCE)


@pytest.fixture
def http_server():
    with mcp_server.serve_http() as server:
        yield server


def at(url: str) -> ChatToolServer:
    return ChatToolServer(url=url, headers={"Authorization": "Bearer secret"}, allowed=True)


async def test_a_program_lists_and_runs_tools_without_the_daemons_secrets(clients, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hidden")
    async with asyncio.timeout(PATIENCE):
        tools = await clients.tools("", "box", PROGRAM)
        assert [tool.name for tool in tools] == list(mcp_server.TOOLS)
        assert not tools[0].changes
        echoed = await clients.call("", "box", PROGRAM, "echo", {"text": "hä"})
        assert echoed.text.splitlines() == ['{"text": "h\\u00e4"}', "[image, not shown to the model]"]
        assert not echoed.failed
        names = (await clients.call("", "box", PROGRAM, "environment", {})).text.split()
        assert "GREETING" in names
        assert "HF_TOKEN" not in names
        assert (await clients.call("", "box", PROGRAM, "fail", {})).failed
        with pytest.raises(ApiError, match="no tool 'other'"):
            await clients.call("", "box", PROGRAM, "other", {})


async def test_a_program_that_dies_is_an_error_with_its_last_words_and_starts_again(clients):
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(ApiError, match="ended with exit code 3: out of luck"):
            await clients.call("", "box", PROGRAM, "die", {})
        assert (await clients.call("", "box", PROGRAM, "echo", {})).text


async def test_one_that_hangs_is_given_up_and_one_that_never_answers_does_not_start(clients, monkeypatch):
    monkeypatch.setattr(mcp_client, "CALL_SECONDS", 0.05)
    silent = ChatToolServer(command=["/bin/cat"], allowed=True)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(ApiError, match=r"hang did not end within 0.05 s"):
            await clients.call("", "box", PROGRAM, "hang", {})
        monkeypatch.setattr(mcp_client, "START_SECONDS", 0.05)
        with pytest.raises(ApiError, match="did not answer within"):
            await clients.tools("", "silent", ChatToolServer(command=["/bin/sleep", "600"]))
        monkeypatch.setattr(mcp_client, "START_SECONDS", PATIENCE)
        with pytest.raises(ApiError, match="refused the connection"):
            await clients.tools("", "echo", silent)
        with pytest.raises(ApiError, match="cannot be started"):
            await clients.tools("", "none", ChatToolServer(command=["/no/such/program"]))
        with pytest.raises(ApiError, match="ended with exit code"):
            await clients.tools("", "false", ChatToolServer(command=["/bin/false"]))


async def test_a_call_that_is_stopped_leaves_the_program_usable_and_the_end_leaves_no_process(clients):
    async with asyncio.timeout(PATIENCE):
        await clients.tools("", "box", PROGRAM)
        call = asyncio.create_task(clients.call("", "box", PROGRAM, "hang", {}))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert (await clients.call("", "box", PROGRAM, "echo", {})).text
        pid = clients._open["", "box"].channel._process.pid
        await clients.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_url_is_asked_with_its_headers_and_session_and_left_politely(clients, http_server):
    async with asyncio.timeout(PATIENCE):
        spec = at(http_server.url)
        assert len(await clients.tools("", "web", spec)) == len(mcp_server.TOOLS)
        assert '"a"' in (await clients.call("", "web", spec, "echo", {"text": "a"})).text
        await clients.close()
    assert http_server.seen[-1] == {"method": "DELETE", "session": "s1"}


async def test_urls_that_are_no_mcp_server_say_why(clients, http_server, monkeypatch):
    root = http_server.url.removesuffix("/mcp")
    cases = {
        f"{root}/elsewhere": "redirects to http://elsewhere.example/mcp",
        f"{root}/page": "not JSON-RPC",
        "http://127.0.0.1:1/mcp": "cannot be reached",
    }
    async with asyncio.timeout(PATIENCE):
        for url, why in cases.items():
            with pytest.raises(ApiError, match=why):
                await clients.tools("", "web", at(url))
        with pytest.raises(ApiError, match="HTTP 401: it needs a header Authorization"):
            await clients.tools("", "web", ChatToolServer(url=http_server.url))
        monkeypatch.setattr(mcp_client, "CALL_SECONDS", 0.05)
        await clients.tools("", "web", at(http_server.url))
        with pytest.raises(ApiError, match="hang did not end"):
            await clients.call("", "web", at(http_server.url), "hang", {})


LEAVES = """
import json, os, sys
(asked := json.loads(sys.stdin.readline()))
os.close(0)
print(json.dumps({"jsonrpc": "2.0", "id": 7, "method": "ping"}), flush=True)
print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": {"text": "still here"}}), flush=True)
sys.stdout.close()
"""


async def test_a_program_that_reads_no_more_may_still_answer():
    channel = await StdioChannel.start([sys.executable, "-c", LEAVES], {})
    async with asyncio.timeout(PATIENCE):
        assert await channel.request("go", {}) == {"text": "still here"}
        await channel.close()
