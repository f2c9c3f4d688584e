"""A disk that is full at a chosen step of replacing a file (`app/util/atomic_file.py`)."""

import errno
import os
from pathlib import Path
from typing import Any, Self

import pytest

STEPS = ["open", "write", "fsync", "replace"]
"""Steps of replacing a file at which the disk may have no more room."""


def fail_at(patch: pytest.MonkeyPatch, step: str) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: Any, **__: Any) -> Any:
        raise full

    if step == "fsync":
        patch.setattr(os, "fsync", fail)
    elif step == "replace":
        patch.setattr(Path, "replace", fail)
    elif step == "open":
        real = os.open
        patch.setattr(
            os,
            "open",
            lambda path, *rest, **more: fail() if str(path).endswith(".new") else real(path, *rest, **more),
        )
    else:
        patch.setattr("llmbox.app.util.atomic_file.open", _FullFile, raising=False)


class _FullFile:
    """Takes half of what it is given."""

    def __init__(self, handle: int, _mode: str) -> None:
        self._handle = handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def write(self, data: bytes) -> None:
        os.write(self._handle, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
