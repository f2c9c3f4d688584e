"""A little MCP server for the client's tests: `python mcp_server.py` on stdio, `serve_http` on a port.

Its tools: `echo` returns its arguments, `environment` the names of its variables, `fail` an error, `hang`
nothing, `die` ends the program.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOOLS = ("echo", "environment", "fail", "hang", "die")


def describe(name: str) -> dict:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {
        "name": name,
        "description": f"Tool {name}.",
        "inputSchema": schema,
        "annotations": {"readOnlyHint": True},
    }


def answer(message: dict) -> dict | None:
    """The response to a message, or None where none is due."""
    if "id" not in message or "method" not in message:
        return None
    params = message.get("params", {})
    match message["method"]:
        case "initialize":
            result = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {},
            }
        case "tools/list":
            at = int(params.get("cursor", 0))  # one tool a page
            result = {"tools": [describe(TOOLS[at])]}
            if at + 1 < len(TOOLS):
                result["nextCursor"] = str(at + 1)
        case "tools/call" if params["name"] == "hang":
            return None
        case "tools/call" if params["name"] == "die":
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)
        case "tools/call":
            texts = {"echo": json.dumps(params.get("arguments")), "environment": " ".join(sorted(os.environ))}
            text = texts.get(params["name"], "it failed")
            content = [{"type": "text", "text": text}, {"type": "image", "data": "", "mimeType": "image/png"}]
            result = {"content": content, "isError": params["name"] == "fail"}
        case _:
            return {
                "jsonrpc": "2.0",
                "id": message["id"],
                "error": {"code": -32601, "message": "no such method"},
            }
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/elsewhere":
            self.reply(302, b"", Location="http://elsewhere.example/mcp")
            return
        if self.path == "/page":
            self.reply(200, b"<html>", **{"Content-Type": "text/html"})
            return
        if self.headers.get("Authorization") != "Bearer secret":
            self.reply(401, b"")
            return
        message = json.loads(body)
        self.server.seen.append(message)
        made = answer(message)
        session = {"Mcp-Session-Id": "s1"} if message.get("method") == "initialize" else {}
        if made is None and "id" in message:
            self.server.ended.wait(60)  # it hangs
        if made is None:
            self.reply(202, b"")
        elif message["method"] == "tools/call":
            ping = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
            events = f": hello\n\ndata: {ping}\n\nevent: message\ndata: {json.dumps(made)}\n\n"
            self.reply(200, events.encode(), **{"Content-Type": "text/event-stream"})
        else:
            self.reply(200, json.dumps(made).encode(), **{"Content-Type": "application/json", **session})

    def do_DELETE(self) -> None:
        self.server.seen.append({"method": "DELETE", "session": self.headers.get("Mcp-Session-Id")})
        self.reply(200, b"")

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serve_http() -> Iterator[ThreadingHTTPServer]:
    """A server whose `seen` has the messages that came, and whose `url` leads to it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.seen, server.ended = [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/mcp"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(60)


if __name__ == "__main__":
    print("this line is not JSON", flush=True)
    for line in sys.stdin:
        made = answer(json.loads(line))
        if made is not None:
            print(json.dumps(made), flush=True)
