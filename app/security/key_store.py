"""Key store: API keys in one small JSON file.

The file is replaced atomically, so after a power cut it is either the old table or the new one; it has no
journal and can be read with any editor. The command line and the daemon both change it under a lock. Readers
check its stamp first, so a revoked key is refused from the next request on.
"""

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..errors import CliError, Exit
from ..util.atomic_file import DelayedFile, locked, write_whole
from ..util.formatting import did_you_mean
from .keys import (
    ApiKey,
    KeyChange,
    KeySpec,
    QuotaLedger,
    QuotaView,
    digest_of,
    display_of,
    is_name,
    new_id,
    new_secret,
    views,
)

log = logging.getLogger("llmbox.security")

MOST_KEYS = 10_000
_SCHEMA = 1
_Stamp = tuple[int, int, int]


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    schema: int
    keys: tuple[ApiKey, ...]


class KeyStore:
    """API keys in one JSON file. Every method may be called from any thread."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stamp: _Stamp | None = None
        self._table: tuple[ApiKey, ...] = ()
        self._by_digest: dict[str, ApiKey] = {}

    def check(self) -> None:
        """Raise CliError when the file cannot be read: otherwise a daemon would start and refuse
        everybody.
        """
        self._refresh()

    def list(self) -> tuple[ApiKey, ...]:
        """All keys by name, expired ones too."""
        self._try_refresh()
        return self._table

    def usable(self) -> int:
        """Number of keys that would be accepted now."""
        return sum(not key.is_expired() for key in self.list())

    def get(self, name: str) -> ApiKey:
        """Find a key by name. Raises CliError (exit 4)."""
        return _find(self.list(), name)

    def ids(self) -> frozenset[str]:
        return frozenset(key.id for key in self.list())

    def by_id(self, id_: str) -> ApiKey | None:
        return next((key for key in self.list() if key.id == id_), None)

    def authenticate(self, secret: str) -> ApiKey | None:
        """Find the key of this secret, unless it has expired. Takes equally long for a wrong secret."""
        digest = digest_of(secret)
        found: ApiKey | None = None
        for key in self.list():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return None if found is None or found.is_expired() else found

    def by_digest(self, digest: str) -> ApiKey | None:
        """Find the key of this hash, unless it has expired. Costs a stat."""
        self._try_refresh()
        key = self._by_digest.get(digest)
        return None if key is None or key.is_expired() else key

    def add(self, spec: KeySpec) -> tuple[ApiKey, str]:
        """Create a key; returns (key, its secret). Raises CliError: exit 9 when the name is taken, 1 when the
        disk is full.
        """
        secret = new_secret()
        key = ApiKey(
            **msgspec.structs.asdict(spec),
            id=new_id(),
            digest=digest_of(secret),
            display=display_of(secret),
            created=time.time(),
        )

        def edit(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
            if any(other.name == key.name for other in keys):
                raise CliError(
                    f"there is a key {key.name} already",
                    "names of keys are unique",
                    f"llmbox key rotate {key.name} gives it a new secret; or choose another name",
                    Exit.CONFLICT,
                )
            if len(keys) >= MOST_KEYS:
                raise CliError("no more keys", f"there are {len(keys)}", "llmbox key rm NAME", Exit.CONFLICT)
            return tuple(sorted((*keys, key), key=lambda each: each.name))

        self._change(edit)
        log.info("key %s (%s) is made", key.name, ", ".join(key.scopes))
        return key, secret

    def remove(self, name: str) -> ApiKey:
        """Revoke a key. Raises CliError (exit 4)."""
        gone: list[ApiKey] = []

        def edit(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
            gone.append(_find(keys, name))
            return tuple(key for key in keys if key is not gone[0])

        self._change(edit)
        log.info("key %s is revoked", name)
        return gone[0]

    def rotate(self, name: str) -> tuple[ApiKey, str]:
        """Make a new secret for a key; the old one is refused from now on. Raises CliError (exit 4)."""
        secret = new_secret()
        changed: list[ApiKey] = []

        def edit(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
            old = _find(keys, name)
            changed[:] = [
                msgspec.structs.replace(
                    old, digest=digest_of(secret), display=display_of(secret), rotated=time.time()
                )
            ]
            return tuple(changed[0] if key is old else key for key in keys)

        self._change(edit)
        log.info("key %s has a new secret", name)
        return changed[0], secret

    def change(self, name: str, change: KeyChange) -> ApiKey:
        """Change limits and permissions of a key; its secret stays. Raises CliError (exit 4)."""
        changed: list[ApiKey] = []

        def edit(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
            old = _find(keys, name)
            changed[:] = [msgspec.structs.replace(old, **change.values())]
            return tuple(changed[0] if key is old else key for key in keys)

        self._change(edit)
        log.info("key %s is changed: %s", name, ", ".join(change.values()) or "nothing")
        return changed[0]

    # ------------------------------------------------------------------ the file

    def _try_refresh(self) -> None:
        """Read the file if it has changed. If it is broken the table stays: no key is granted or revoked."""
        try:
            self._refresh()
        except CliError as error:
            log.error("%s (%s): the keys as they were stay in force", error.what, error.why)  # noqa: TRY400

    def _refresh(self) -> None:
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp  # set first, so that a broken file is reported once
        self._take(() if stamp is None else _parse(self._file))

    def _take(self, keys: tuple[ApiKey, ...]) -> None:
        self._table, self._by_digest = keys, {key.digest: key for key in keys}

    def _change(self, edit: Callable[[tuple[ApiKey, ...]], tuple[ApiKey, ...]]) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self._file.with_suffix(".lock")):
                self._stamp = None
                self._refresh()
                keys = edit(self._table)
                write_whole(
                    self._file, msgspec.json.format(msgspec.json.encode(_KeyFile(_SCHEMA, keys)), indent=1)
                )
                self._stamp = _stamp(self._file)
                self._take(keys)
        except OSError as error:
            self._stamp = None
            raise CliError(
                "cannot write the key file",
                f"{error.strerror or error}: {self._file}",
                "free some space or fix the folder's mode, then try again; nothing was changed",
            ) from error


def _find(keys: tuple[ApiKey, ...], name: str) -> ApiKey:
    found = next((key for key in keys if key.name == name), None)
    if found is None:
        shown = name if is_name(name) else repr(name[:64])
        hint = did_you_mean(name[:64], (key.name for key in keys))
        raise CliError(
            f"there is no key {shown}", "it is not in the list", f"{hint}llmbox key ls", Exit.NOT_FOUND
        )
    return found


def _stamp(file: Path) -> _Stamp | None:
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _broken(file, error.strerror or str(error)) from error
    return status.st_mtime_ns, status.st_size, status.st_ino


def _parse(file: Path) -> tuple[ApiKey, ...]:
    try:
        read = msgspec.json.decode(file.read_bytes(), type=_KeyFile)
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise _broken(file, str(error)) from None
    if read.schema != _SCHEMA:
        raise _broken(file, f"its schema is {read.schema}, this version reads {_SCHEMA}")
    return tuple(sorted(read.keys, key=lambda each: each.name))


def _broken(file: Path, why: str) -> CliError:
    return CliError(
        "the key file cannot be read",
        f"{file}: {why}",
        "fix it, or move it away and create all keys again",
    )


EVERY = 60.0
"""Seconds between two writes while keys are in use."""


class LastUsed:
    """Time of last use of each key. `note` is called for every request and costs a dictionary entry."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._times: dict[str, float] | None = None
        self._file = DelayedFile(
            file, EVERY, lambda: msgspec.json.encode(dict(self._known())), "when keys were last used"
        )

    def note(self, key_id: str) -> None:
        self._known()[key_id] = time.time()
        self._file.touch()

    def of(self, key_id: str) -> float | None:
        """Time of last use in Unix seconds."""
        return self._known().get(key_id)

    def forget(self, key_id: str) -> None:
        self._known().pop(key_id, None)

    def write(self) -> None:
        self._file.write()

    def close(self) -> None:
        self._file.close()

    def _known(self) -> dict[str, float]:
        if self._times is None:
            try:
                self._times = msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])
            except (OSError, msgspec.MsgspecError, UnicodeError):
                self._times = {}
        return self._times


class KeyView(msgspec.Struct, kw_only=True):
    """Fields of a key that may be shown. Times are Unix seconds."""

    id: str
    name: str
    display: str
    scopes: tuple[str, ...]
    models: tuple[str, ...]
    expires: float | None
    expired: bool
    rpm: int | None
    tpm: int | None
    priority: int
    log_content: bool
    created: float
    rotated: float | None
    last_used: float | None
    requests_day: int | None
    requests_month: int | None
    tokens_day: int | None
    tokens_month: int | None
    budget_day: float | None
    budget_month: float | None
    quotas: list[QuotaView]
    """Quotas and budgets that are set, with what is used of them."""


def view(key: ApiKey, used: LastUsed, ledger: QuotaLedger) -> KeyView:
    """Make the view of a key."""
    fields = msgspec.structs.asdict(key)
    del fields["digest"]
    return KeyView(
        **fields,
        expired=key.is_expired(),
        last_used=used.of(key.id),
        quotas=list(views(key, ledger.of(key.id))),
    )
