"""Envelope, methods and tools of the MCP server, without a transport."""

import asyncio

import msgspec
import pytest

from llmbox.app.mcp.features import DOCS, ToolError, resources
from llmbox.app.mcp.protocol import VERSIONS, McpServer, RpcError, check_message, decode_message
from llmbox.app.mcp.tools import TOOLS


class Canned:
    """Answers of the API by path. A list is answered one after another, the last again and again."""

    def __init__(self, **answers):
        self.answers, self.seen = answers, []

    async def request(self, method, path, query, body, seconds):
        self.seen.append((method, path, dict(query), body))
        found = self.answers[path.rpartition("/")[2]]
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(found, Exception):
            raise found
        if found is asyncio.Event:
            await asyncio.Event().wait()
        return found

    async def own_requests(self, query):
        return {"requests": []}


def request(method: str, params: dict | None = None, id_: int | str = 1) -> dict:
    return {"jsonrpc": "2.0", "id": id_, "method": method, "params": params or {}}


def server(allowed=lambda _: True, **answers) -> tuple[McpServer, list[dict]]:
    sent: list[dict] = []
    made = McpServer(Canned(**answers), "1.0", allowed)

    async def send(message):
        sent.append(message)

    made.send = send
    return made, sent


async def call(subject: McpServer, name: str, arguments: dict | None = None, **meta) -> dict:
    params = {"name": name, "arguments": arguments or {}, **({"_meta": meta} if meta else {})}
    answer = await subject.answer(request("tools/call", params), subject.send)
    return answer["result"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"{", -32700),
        (b"\xff", -32700),
        (b"[]", -32600),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', -32600),
        (b"1", -32600),
        (b'{"id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":1}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}', -32602),
    ],
)
def test_a_bad_envelope_is_refused_with_its_code(data, code):
    with pytest.raises(RpcError) as error:
        decode_message(data)
    assert error.value.code == code


@pytest.mark.parametrize("asked", [*VERSIONS, "1999-01-01"])
async def test_it_answers_in_the_clients_version_or_names_its_newest(asked):
    subject, _ = server()
    answer = await subject.answer(request("initialize", {"protocolVersion": asked}), subject.send)
    assert answer["result"]["protocolVersion"] == (asked if asked in VERSIONS else VERSIONS[0])
    assert answer["result"]["capabilities"] == {"tools": {}, "resources": {}}
    assert (await subject.answer(request("ping"), subject.send))["result"] == {}


async def test_unknown_methods_and_tools_are_errors_of_the_protocol():
    subject, _ = server()
    answer = await subject.answer(request("prompts/list"), subject.send)
    assert answer["error"]["code"] == -32601
    for name in ("rm", 1, None, ["a"]):
        answer = await subject.answer(request("tools/call", {"name": name}), subject.send)
        assert answer["error"]["code"] == -32602
        assert "list_models" in answer["error"]["message"]
    assert (
        await subject.answer({"jsonrpc": "2.0", "method": "notifications/initialized"}, subject.send) is None
    )
    assert await subject.answer({"jsonrpc": "2.0", "id": 9, "result": {}}, subject.send) is None


def test_every_tool_has_a_closed_schema_and_says_whether_it_changes_anything():
    for tool in TOOLS.values():
        entry = tool.describe()
        assert entry["inputSchema"]["type"] == "object"
        assert entry["inputSchema"]["additionalProperties"] is False
        assert "$ref" not in str(entry)
        assert entry["annotations"]["readOnlyHint"] is not tool.changes
        assert check_message(request("x", msgspec.to_builtins(entry)))
    assert {tool.name for tool in TOOLS.values() if tool.changes} == {
        "pull_model",
        "load_model",
        "unload_model",
    }
    assert [tool.name for tool in TOOLS.values() if tool.destructive] == ["unload_model"]


async def test_wrong_arguments_and_failures_are_results_that_say_what_to_do():
    subject, _ = server(fit=ToolError("no such model. Run: llmbox search"))
    for arguments in ({}, {"model": 1}, {"model": "a", "other": 1}, [1]):
        result = await call(subject, "check_fit", arguments)
        assert result["isError"]
        assert "check_fit" in result["content"][0]["text"] or arguments == {}
    result = await call(subject, "check_fit", {"model": "a"})
    assert result == {
        "content": [{"type": "text", "text": "no such model. Run: llmbox search"}],
        "isError": True,
    }


async def test_a_tool_outside_the_keys_scope_is_neither_listed_nor_run():
    subject, _ = server(lambda tool: tool.scope is None, stats={"total": 1})
    listed = (await subject.answer(request("tools/list"), subject.send))["result"]["tools"]
    assert [each["name"] for each in listed] == ["list_models"]
    result = await call(subject, "get_stats")
    assert result["isError"]
    assert "--scope admin" in result["content"][0]["text"]


async def test_a_pull_reports_progress_and_ends_with_the_state(monkeypatch):
    monkeypatch.setattr("llmbox.app.mcp.tools.LOOK_AGAIN", 0)
    rows = [
        {"model": "org/little", "state": state, "done": done, "total": 10, "files": [], "error": None}
        for state, done in (("checking", 0), ("downloading", 5), ("downloading", 5), ("ready", 10))
    ]
    answers = [{"download": rows[0]}, *({"downloads": [row]} for row in rows)]
    subject, sent = server(downloads=answers)
    result = await call(subject, "pull_model", {"model": "little"}, progressToken="p")
    assert result["structuredContent"]["download"]["state"] == "ready"
    assert [each["params"]["progress"] for each in sent] == [0, 5, 10]
    assert {each["params"]["progressToken"] for each in sent} == {"p"}


async def test_a_load_that_fails_is_an_error_with_its_cause_and_one_that_lasts_is_not_waited_for():
    def row(state: str) -> dict:
        return {"name": "tiny", "state": state, "cause": "out of memory", "ref": "tiny"}

    subject, _ = server(load={"model": row("loading")}, models=[{"models": [row("failed")]}])
    result = await call(subject, "load_model", {"model": "tiny"})
    assert result["isError"]
    assert "out of memory" in result["content"][0]["text"]
    subject, _ = server(load={"model": row("loading")}, models={"models": [row("loading")]})
    result = await call(subject, "load_model", {"model": "tiny", "wait_s": 0})
    assert result["structuredContent"]["model"]["state"] == "loading"


async def test_a_cancelled_request_ends_without_a_response():
    subject, _ = server(doctor=asyncio.Event)
    params = {"name": "run_doctor"}
    open_request = asyncio.create_task(subject.answer(request("tools/call", params, "a"), subject.send))
    for _ in range(9):
        await asyncio.sleep(0)
    assert subject._caller.seen
    again = await subject.answer(request("ping", id_="a"), subject.send)
    assert again["error"]["code"] == -32600
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "a"}}
    assert await subject.answer(cancel, subject.send) is None
    assert await asyncio.wait_for(open_request, 60) is None


async def ask(subject: McpServer, method: str, **params) -> dict:
    return await subject.answer(request(method, params), subject.send)


async def test_resources_are_the_state_of_the_box_and_the_pages_of_the_documentation():
    subject, _ = server(models={"models": []}, config={"settings": {"server.port": {"value": 7411}}})
    begun = await ask(subject, "initialize", protocolVersion=VERSIONS[0])
    assert set(begun["result"]["capabilities"]) == {"tools", "resources"}
    listed = (await ask(subject, "resources/list"))["result"]["resources"]
    assert [each["uri"] for each in listed] == list(resources())
    pages = {each["uri"]: each for each in listed if each["mimeType"] == "text/markdown"}
    assert len(pages) == len(list(DOCS.glob("*.md"))) > 15
    assert pages["llmbox://docs/mcp"]["title"] == "MCP"
    for uri in resources():
        (content,) = (await ask(subject, "resources/read", uri=uri))["result"]["contents"]
        assert content["uri"] == uri
        if uri in pages:
            assert content["text"].startswith("# ")
        else:
            msgspec.json.decode(content["text"])
    assert (await ask(subject, "resources/templates/list"))["result"] == {"resourceTemplates": []}


@pytest.mark.parametrize(
    "uri", [None, 7, "", "llmbox://docs/../README", "llmbox://docs/none", "file:///etc/passwd"]
)
async def test_a_resource_that_is_not_there_is_told(uri):
    subject, _ = server()
    error = (await ask(subject, "resources/read", uri=uri))["error"]
    assert (error["code"], "resources/list" in error["message"]) == (-32002, True)


async def test_resources_beyond_the_scope_are_neither_listed_nor_read():
    subject, _ = server(allowed=lambda each: each.scope is None)
    uris = {each["uri"] for each in (await ask(subject, "resources/list"))["result"]["resources"]}
    assert "llmbox://models" in uris
    assert uris.isdisjoint({"llmbox://settings", "llmbox://requests", "llmbox://models/memory"})
    error = (await ask(subject, "resources/read", uri="llmbox://settings"))["error"]
    assert "--scope admin" in error["message"]


async def test_a_daemon_that_does_not_answer_is_the_error_of_a_resource():
    subject, _ = server(config=ToolError("the daemon is not running. Run: llmbox up"))
    error = (await ask(subject, "resources/read", uri="llmbox://settings"))["error"]
    assert "llmbox up" in error["message"]
