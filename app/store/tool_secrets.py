"""Secrets of the MCP servers that the panel's chat uses: values of headers and environment variables.

They are in a file of mode 0600 beside the API keys. The database has only their names, so that no copy of it
(`llmbox db backup`) holds a secret.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..errors import ApiError
from ..util.atomic_file import locked, write_whole
from .conversations import ChatToolServer
from .record import first_line
from .writer import RequestLog

if TYPE_CHECKING:
    from sqlalchemy import Engine

log = logging.getLogger(__name__)

SCHEMA: Final = 1


class ServerSecrets(Struct, kw_only=True, forbid_unknown_fields=True):
    headers: dict[str, str] = {}
    environment: dict[str, str] = {}


_Secrets = dict[str, dict[str, ServerSecrets]]
"""Secrets by owner and server."""


class _SecretsFile(Struct):
    schema: int
    servers: _Secrets


def without_values(spec: ChatToolServer) -> ChatToolServer:
    """Return a server as the database has it: names of headers and variables with empty values."""
    return replace(
        spec, headers=dict.fromkeys(spec.headers, ""), environment=dict.fromkeys(spec.environment, "")
    )


def has_values(spec: ChatToolServer) -> bool:
    """Return whether a server stands in the database with its secrets: older versions wrote it so."""
    return any([*spec.headers.values(), *spec.environment.values()])


@dataclass(frozen=True, slots=True)
class ToolServerSecrets:
    """The file. Every method reads or writes the disk, and raises ApiError 503 where it cannot."""

    file: Path

    def take_from(self, requests: RequestLog) -> None:
        """Have the secrets moved here that an older version left in the database, once that is open."""

        def move(engine: "Engine | None") -> None:
            if engine is None:
                return
            from .queries.conversations import move_secrets  # noqa: PLC0415 - see `RequestLog`

            try:
                move_secrets(engine, self)
            except Exception as error:  # noqa: BLE001 - it would end the log's thread
                log.warning("secrets of MCP servers stay in the request log: %s", first_line(error))

        requests.submit(move)

    def save(self, owner: str, name: str, spec: ChatToolServer) -> None:
        """Keep a server's secrets in place of those kept before."""
        own = ServerSecrets(headers=dict(spec.headers), environment=dict(spec.environment))

        def change(kept: _Secrets) -> None:
            kept.setdefault(owner, {})[name] = own
            if not (own.headers or own.environment):
                del kept[owner][name]

        self._change(change)

    def remove(self, owner: str, name: str) -> None:
        self._change(lambda kept: kept.get(owner, {}).pop(name, None))

    def keep_owners(self, known: frozenset[str]) -> None:
        """Remove the secrets of keys that are not `known`. Those of the box's own user stay."""

        def change(kept: _Secrets) -> None:
            for owner in [each for each in kept if each and each not in known]:
                del kept[owner]

        self._change(change)

    def filled(self, owner: str, name: str, spec: ChatToolServer) -> ChatToolServer:
        """Return a server of the database with its secrets. Raises ApiError 409 where one is lost."""
        own = self._read().get(owner, {}).get(name) or ServerSecrets()
        lost = [each for each in spec.headers if each not in own.headers]
        lost += [each for each in spec.environment if each not in own.environment]
        if lost:
            raise ApiError(
                409,
                f"The value of {', '.join(lost)} is not on this box (a restored database comes without it). "
                f"Remove the MCP server {name} under Tools in the chat and add it again.",
                "mcp_secret_missing",
                "name",
            )
        return replace(spec, headers=own.headers, environment=own.environment)

    def _read(self) -> _Secrets:
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=_SecretsFile).servers
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._unusable(f"cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError:
            raise self._unusable("is damaged: move it away and enter the secrets again") from None

    def _change(self, change: Callable[[_Secrets], Any]) -> None:
        try:
            with locked(self.file.with_suffix(".lock")):
                kept = self._read()
                before = msgspec.json.encode(kept)
                change(kept)
                kept = {owner: servers for owner, servers in kept.items() if servers}
                if not kept:
                    self.file.unlink(missing_ok=True)
                elif msgspec.json.encode(kept) != before:
                    write_whole(self.file, msgspec.json.encode(_SecretsFile(SCHEMA, kept)))
        except OSError as error:
            raise self._unusable(f"cannot be written: {error.strerror}") from None

    def _unusable(self, why: str) -> ApiError:
        message = f"{self.file.name} in the data folder {why}."
        return ApiError(503, message, "mcp_secrets_unusable", None, "server_error")
