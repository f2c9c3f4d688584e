"""Cache of the text side of models: parsing a tokenizer takes up to half a second of a processor."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from .sandboxed_encoder import SandboxedEncoder
from .tokenizer import TextModel, load_model_text

KEPT: Final = 2
"""Most models that are kept without being in memory. Each takes some 60 MB with 150,000 tokens."""

Stamp = tuple[tuple[str, int, int, int], ...]


class TextCache:
    """Text models by folder: those in use, and of the others the last `KEPT`.

    `load` and `release` are called from one event loop or from its threads. A model is loaded anew when a
    file in its folder has changed, and when texts are encoded in a process of its own.
    """

    def __init__(self, load: Callable[[Path], TextModel] = load_model_text) -> None:
        self._load = load
        self._made: dict[Path, tuple[Stamp, TextModel]] = {}
        self._unused: dict[Path, None] = {}
        """Folders of the kept ones, the oldest first."""

    def load(self, folder: Path) -> TextModel:
        """Return the text model of a folder until `release`. Raises ModelError."""
        self._unused.pop(folder, None)
        stamp = read_stamp(folder)
        made = self._made.get(folder)
        if made is not None and made[0] == stamp:
            return made[1]
        text = self._load(folder)
        if not isinstance(text.encoder, SandboxedEncoder):
            self._made[folder] = stamp, text
        return text

    def release(self, folder: Path) -> list[TextModel]:
        """Keep a model that is used no more. Returns those that are kept no longer: to free one takes tens of
        milliseconds, so the caller may choose when.
        """
        if folder in self._made:
            self._unused.pop(folder, None)
            self._unused[folder] = None
        return [self._forget(oldest) for oldest in list(self._unused)[:-KEPT]]

    def clear(self) -> list[TextModel]:
        """Keep none that is not used. Returns them."""
        return [self._forget(folder) for folder in list(self._unused)]

    def _forget(self, folder: Path) -> TextModel:
        del self._unused[folder]
        return self._made.pop(folder)[1]


def read_stamp(folder: Path) -> Stamp:
    """Return names, sizes, times and inodes of the files of a folder; empty where it cannot be read."""
    return tuple(sorted(_read_files(folder)))


def _read_files(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    for pattern in ("*", "additional_chat_templates/*"):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # removed meanwhile, or a link to nothing
                status = path.stat()
                yield str(path), status.st_size, status.st_mtime_ns, status.st_ino
