"""Facts from the files of a model, loaded or not: sizes, architecture, chat template."""

import contextlib
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from llmbox.engine.errors import EngineError
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.model_config.pooling import is_declared

from ..text.tokenizer.tokenizer import read_generation_defaults, read_template

_SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Facts of one model folder. Unreadable parts are left out: loading reports the problem."""

    size: int
    """Bytes of all files."""
    modified: float
    """Unix seconds."""
    digest: str
    """64 hex digits that change when a file changes."""
    config: ModelConfig | None = None
    template: str | None = None
    defaults: dict[str, float] = field(default_factory=dict)
    """Default sampling parameters."""
    for_vectors: bool = False
    """The model makes embeddings, and no text."""

    @property
    def parameters(self) -> int | None:
        return None if self.config is None else self.config.num_parameters

    @property
    def stored_as(self) -> str:
        """Type of the weights in the files; empty when unknown."""
        if self.config is None:
            return ""
        return self.config.quant or _SHORT[self.config.dtype]


def read_card(folder: Path) -> Card:
    """Read the card of a folder. Reads small files only. May be called from any thread."""
    stamps = {
        path.relative_to(folder).as_posix(): _stamp(path) for path in folder.rglob("*") if path.is_file()
    }
    listing = "".join(f"{name}\0{mark}\n" for name, (mark, _, _) in sorted(stamps.items()))
    config, template, defaults = None, None, {}
    with contextlib.suppress(EngineError, OSError):
        config = parse_config(folder)
    with contextlib.suppress(EngineError, OSError):
        template = read_template(folder)
    with contextlib.suppress(EngineError, OSError):
        defaults = read_generation_defaults(folder)
    return Card(
        size=sum(size for _, size, _ in stamps.values()),
        modified=max((at for _, _, at in stamps.values()), default=0.0),
        digest=hashlib.sha256(listing.encode()).hexdigest(),
        config=config,
        template=template,
        defaults=defaults,
        for_vectors=is_declared(folder) or (config is not None and not config.has_head),
    )


def _stamp(path: Path) -> tuple[str, int, float]:
    """Return (identity of the content, bytes, Unix seconds). In a hub cache a file is named by its hash."""
    status = path.stat()
    mark = path.resolve().name if path.is_symlink() else f"{status.st_size} {status.st_mtime_ns}"
    return mark, status.st_size, status.st_mtime
