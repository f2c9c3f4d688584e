"""Model folders of GGUF files, made in the data folder when a file is first named.

A folder holds what the file says of the model (config, tokenizer, chat template) and a link to it: the
weights stay where they are. It is made anew when the file changes.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.config import name_of
from llmbox.engine.gguf.folder import LINK, write_folder
from llmbox.engine.gguf.reader import read_gguf

from ..errors import CliError, Exit


def folder_of(file: Path, home: Path) -> Path:
    """Return the model folder of a GGUF file, made under `home` if needed. Raises CliError."""
    file = file.expanduser().resolve()
    try:
        status = file.stat()
        stamp = f"{file}\0{status.st_size}\0{status.st_mtime_ns}"
        place = home / hashlib.sha256(stamp.encode()).hexdigest()[:12]
        made = next((each for each in place.glob("*") if (each / LINK).is_symlink()), None)
        return made or _make(file, place)
    except ModelError as error:
        raise CliError(
            f"{file.name} cannot be served", str(error), "docs/models.md has what can be read", Exit.FAILED
        ) from None
    except OSError as error:
        raise CliError(
            f"{file.name} cannot be served",
            f"{error.filename or file}: {error.strerror or error}",
            f"the file must be readable, and {home} writable with some space",
            Exit.FAILED,
        ) from None


def _make(file: Path, place: Path) -> Path:
    from ..text.tokenizer.gguf_tokenizer import write_tokenizer  # noqa: PLC0415 - the library is slow to import

    gguf = read_gguf(file)
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=".making-"))
    try:
        folder = part / name_of(gguf)
        folder.mkdir()
        write_folder(gguf, folder)
        write_tokenizer(gguf.metadata, folder)
        if not place.exists():  # another command may have been a moment faster
            part.rename(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _forget_older(file, place)
    return place / folder.name


def _forget_older(file: Path, place: Path) -> None:
    """Remove folders of earlier versions of the file, and of files that are gone."""
    for link in place.parent.glob(f"[!.]*/*/{LINK}"):
        if link.parents[1] != place and (link.resolve() == file or not link.exists()):
            shutil.rmtree(link.parents[1], ignore_errors=True)
