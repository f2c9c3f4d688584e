"""The admin API of another box, over HTTP(S) with an admin key."""

import ssl
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from llmbox.app.cli.client import Client
from llmbox.app.errors import CliError, Exit
from llmbox.app.paths import Paths

LEAST_KEY = 20


class RemoteClient(Client):
    def __init__(self, paths: Paths, url: str, key_file: Path) -> None:
        """Raises CliError for a URL or a key that cannot be one."""
        super().__init__(paths)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise CliError(f"{url} is no URL", str(error), "--remote http://HOST:7411", Exit.USAGE) from error
        if parts.scheme not in {"http", "https"} or not self._host:
            raise CliError(f"{url} is no URL", "", "--remote http://HOST:7411", Exit.USAGE)
        self._secure = parts.scheme == "https"
        self._key = _read_key(key_file)
        self.url = f"{parts.scheme}://{parts.netloc}"

    def connect(self, timeout: float | None) -> HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return HTTPSConnection(self._host, self._port, timeout=timeout, context=context)
        return HTTPConnection(self._host, self._port or 7411, timeout=timeout)

    def headers(self) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {self._key}"}

    def not_running(self) -> CliError:
        return CliError(
            f"nobody answers at {self.url}", "the connection was refused", "llmbox status, over there",
            Exit.UNREACHABLE,
        )  # fmt: skip


def _read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise CliError(
            f"{path} cannot be read as a key", str(error), "llmbox key add NAME --scope admin", Exit.USAGE
        ) from error
    if len(key) < LEAST_KEY or any(char.isspace() for char in key):
        raise CliError(f"{path} holds no key", "", "llmbox key add NAME --scope admin > FILE", Exit.USAGE)
    return key
