"""Keyed hash of an answer's tokens: compares two answers without keeping either.

The key is a secret of this installation in a file beside the log. Without that file nobody who gets rows of
the log, or all of it, can test candidate answers against a hash.
"""

import hashlib
import hmac
import logging
import secrets
from array import array
from collections.abc import Sequence
from pathlib import Path

from ..util.atomic_file import write_whole

log = logging.getLogger(__name__)

_BYTES = 32


class OutputHasher:
    """Hasher of token ids, keyed by this installation's secret."""

    def __init__(self, file: Path) -> None:
        self._secret = _read(file)

    def of(self, outputs: Sequence[Sequence[int]]) -> str:
        """Hash the token ids of every choice. Empty where there are none, or where no secret can be kept."""
        if not self._secret or not any(outputs):
            return ""
        keyed = hmac.new(self._secret, digestmod="sha256")
        for output in outputs:
            keyed.update(len(output).to_bytes(8, "little"))
            keyed.update(array("I", output).tobytes())
        return f"{hashlib.sha256(self._secret).hexdigest()[:8]}:{keyed.hexdigest()}"


def _read(file: Path) -> bytes:
    """Read the secret, creating it at the first start. Empty while the disk cannot hold it."""
    try:
        if not file.exists():
            write_whole(file, secrets.token_bytes(_BYTES))
        secret = file.read_bytes()
    except OSError as error:
        log.warning("answers cannot be compared with later ones: %s: %s", file, error.strerror)
        return b""
    if len(secret) != _BYTES:
        log.warning("answers cannot be compared with later ones: %s is damaged; remove it", file)
        return b""
    return secret


def same(one: str, other: str) -> bool | None:
    """Compare two hashes. None when unknown: a hash is missing, or the secret has changed since."""
    if not one or not other or one.partition(":")[0] != other.partition(":")[0]:
        return None
    return hmac.compare_digest(one, other)
