"""A hub on loopback that speaks what huggingface_hub and we ask: listings, search, files, redirects.

Large files come from a second server (another origin), as from the real hub. Faults are functions that see a
request and answer it wrongly, or return False to let it pass.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LARGE = 1000
"""Files from this size on are "LFS": named by sha256 and served from the other origin."""


@dataclass
class StubRepo:
    files: dict[str, bytes]
    commit: str = "c" * 40
    gated: bool = False
    token: str | None = None
    """Needed to see it."""
    license: str = ""


@dataclass(frozen=True)
class Seen:
    server: str
    method: str
    path: str
    headers: dict[str, str]


Fault = Callable[["Handler"], bool]


@dataclass
class StubHub:
    repos: dict[str, StubRepo] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    chunk_pause: float = 0.0
    """Seconds between 16 kB of a large file."""
    hold_after: int | None = None
    """Bytes of each answer with a large file after which the rest waits for `go_on`."""
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    cdn_url: str = ""

    def requests(self, server: str, part: str = "") -> list[Seen]:
        return [each for each in self.seen if each.server == server and part in each.path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StubHub
    name: str

    def log_message(self, *_: Any) -> None:
        return

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):
            super().handle_one_request()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.seen.append(
            Seen(self.name, self.command, self.path, {k.title(): v for k, v in self.headers.items()})
        )
        if any(fault(self) for fault in list(self.hub.faults)):
            return
        self.route()

    def route(self) -> None:
        parts = urlsplit(self.path)
        if self.name == "cdn":
            return self.cdn(parts.path)
        if parts.path == "/api/models":
            return self.search(parse_qs(parts.query))
        if parts.path.startswith("/api/models/"):
            repo, _, revision = parts.path.removeprefix("/api/models/").partition("/revision/")
            return self.info(repo, revision or "main")
        repo, _, rest = parts.path.removeprefix("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        return self.resolve(repo, revision, name)

    # ------------------------------------------------------------------ answers

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str = "", **headers: str) -> bool:
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **more})
        return True

    def json(self, value: Any) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def find(self, repo: str) -> StubRepo | None:
        found = self.hub.repos.get(repo)
        bearer = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if found is None or (found.token is not None and bearer != found.token):
            self.fail(404 if bearer else 401, "RepoNotFound")
            return None
        return found

    def info(self, name: str, revision: str) -> None:
        if (repo := self.find(name)) is None:
            return
        if revision not in {"main", "v1", repo.commit}:
            self.fail(404, "RevisionNotFound")
            return
        siblings = []
        for file, data in repo.files.items():
            entry: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": git_sha1(data)}
            if len(data) >= LARGE:
                entry["lfs"] = {
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 130,
                }
            siblings.append(entry)
        self.json({**self.summary(name, repo), "siblings": siblings})

    def summary(self, name: str, repo: StubRepo) -> dict[str, Any]:
        return {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": repo.commit,
            "private": repo.token is not None,
            "gated": "manual" if repo.gated else False,
            "downloads": 7,
            "likes": 1,
            "tags": ["safetensors", *([f"license:{repo.license}"] if repo.license else [])],
            "createdAt": "2025-01-01T00:00:00.000Z",
        }

    def search(self, query: dict[str, list[str]]) -> None:
        text = query.get("search", [""])[0]
        self.json([self.summary(name, repo) for name, repo in self.hub.repos.items() if text in name])

    def resolve(self, name: str, revision: str, file: str) -> None:
        repo = self.find(name)
        if repo is None:
            return
        if repo.gated:
            self.fail(403, "GatedRepo")
            return
        data = repo.files.get(file)
        if data is None or revision not in {"main", "v1", repo.commit}:
            self.fail(404, "EntryNotFound")
            return
        common = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if len(data) < LARGE:
            self.bytes_of(data, {**common, "ETag": f'"{git_sha1(data)}"'})
            return
        sha = hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data)), "ETag": '"other"'}
        self.answer(302, b"", {**common, **linked, "Location": f"{self.hub.cdn_url}/{name}/{file}"})

    def cdn(self, path: str) -> None:
        name, _, file = path.removeprefix("/").rpartition("/")
        data = self.hub.repos[name].files[file]
        self.bytes_of(data, {"ETag": '"md5-of-the-cdn"'})

    def bytes_of(self, data: bytes, headers: dict[str, str], *, cut: int | None = None) -> None:
        """With ranges. `cut` closes the connection after that many bytes."""
        status, wanted = 200, data
        if span := self.headers.get("Range"):
            first, _, last = span.removeprefix("bytes=").partition("-")
            end = int(last) + 1 if last else len(data)
            wanted = data[int(first) : end]
            status = 206
            headers = {**headers, "Content-Range": f"bytes {first}-{end - 1}/{len(data)}"}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(wanted)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut is not None:
            self.wfile.write(wanted[:cut])
            self.close_connection = True
            return
        hold = self.hub.hold_after
        step = 16_384 if self.hub.chunk_pause or hold is not None else len(wanted) or 1
        for start in range(0, len(wanted), step):
            if hold is not None and start >= hold:
                self.hub.go_on.wait(60)
            self.wfile.write(wanted[start : start + step])
            if self.hub.chunk_pause:
                time.sleep(self.hub.chunk_pause)


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def times(count: int, part: str, act: Callable[[Handler], Any], server: str = "hub") -> Fault:
    """Does `act` at the first `count` requests whose path has `part`."""
    left = [count]
    lock = threading.Lock()

    def fault(handler: Handler) -> bool:
        if handler.name != server or part not in handler.path:
            return False
        with lock:
            if not left[0]:
                return False
            left[0] -= 1
        act(handler)
        return True

    return fault


@contextmanager
def stub_hub() -> Iterator[StubHub]:
    hub = StubHub()
    servers = []
    for name in ("hub", "cdn"):
        handler = type("Bound", (Handler,), {"hub": hub, "name": name})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        server.handle_error = lambda *_: None
        threading.Thread(target=lambda s=server: s.serve_forever(0.02), daemon=True).start()
        servers.append(server)
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    try:
        yield hub
    finally:
        hub.go_on.set()
        for server in servers:
            server.shutdown()
            server.server_close()
