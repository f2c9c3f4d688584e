"""Files that end with a digest of the content before it, so that damage is detected.

The loader ignores bytes after the sections of an ELF file.
"""

import hashlib
from pathlib import Path

DIGEST_BYTES = 32


def seal(path: Path) -> None:
    body = path.read_bytes()
    path.write_bytes(body + hashlib.sha256(body).digest())


def is_sealed(path: Path) -> bool:
    """Return whether the file exists and is undamaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]
