"""Whether two answers were the same tokens, without keeping either.

The hash is keyed by a secret of this installation in a file beside the log: who gets rows of the log, or all
of it without that file, cannot try out answers until one fits.
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
    def __init__(self, file: Path) -> None:
        self._secret = _read(file)

    def of(self, outputs: Sequence[Sequence[int]]) -> str:
        """Of the token ids of every choice; empty where there are none, or no secret can be kept."""
        if not self._secret or not any(outputs):
            return ""
        keyed = hmac.new(self._secret, digestmod="sha256")
        for output in outputs:
            keyed.update(len(output).to_bytes(8, "little"))
            keyed.update(array("I", output).tobytes())
        return f"{hashlib.sha256(self._secret).hexdigest()[:8]}:{keyed.hexdigest()}"


def _read(file: Path) -> bytes:
    """Made at the first start. Empty, until the next one, where the disk does not let us."""
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
    """None where it cannot be told: no hash, or the secret is not the one of then."""
    if not one or not other or one.partition(":")[0] != other.partition(":")[0]:
        return None
    return hmac.compare_digest(one, other)
