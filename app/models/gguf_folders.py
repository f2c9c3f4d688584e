"""Model folders of GGUF files, made in the data folder when a file is first named.

A folder holds what the file says of the model (config, tokenizer, chat template) and a link to it: the
weights stay where they are. It is made anew when the file changes.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.config import name_of
from llmbox.engine.gguf.folder import LINK, write_folder
from llmbox.engine.gguf.reader import PART, read_gguf

from ..errors import CliError, Exit

_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD[-_])?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE
)
_WITH_IMAGES = re.compile(r"(?:^|.*[-._])mmproj(?:[-._].*)?", re.IGNORECASE)


def is_projector(name: str) -> bool:
    """Return whether a file holds the part of a model that reads images (mmproj)."""
    return _WITH_IMAGES.fullmatch(Path(name).stem) is not None


def quantizations(names: Iterable[str]) -> dict[str, list[list[str]]]:
    """Group the GGUF files of a repository: for each quantization its models, each the names of its parts."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not is_projector(name):
            models.setdefault(PART.sub(".gguf", name), []).append(name)
    found: dict[str, list[list[str]]] = {}
    for whole, parts in models.items():
        label = _QUANTIZATION.search(Path(whole).stem)
        count = PART.search(parts[0])
        if label is not None and (count is None or len(parts) == int(count[2])):
            found.setdefault(label[1].upper(), []).append(parts)
    return found


def choose_quantization(repo: str, names: Iterable[str], wanted: str) -> list[str]:
    """Return the files of a quantization, the first part first. Raises CliError naming those there are."""
    found = quantizations(names)
    models = found.get(wanted.upper(), [])
    if len(models) == 1:
        return models[0]
    if models:
        why = "several files are of it: " + ", ".join(parts[0] for parts in models)
        raise CliError(
            f"{repo}:{wanted} is ambiguous", why, "download one of them and name its path", Exit.FAILED
        )
    why = f"it has {', '.join(found)}" if found else "it has no GGUF files with a quantization in their names"
    fix = f"llmbox pull {repo}:{next(iter(found))}" if found else "llmbox search TEXT"
    raise CliError(f"{repo} has no quantization {wanted}", why, fix, Exit.NOT_FOUND)


def folder_of(file: Path, home: Path) -> Path:
    """Return the model folder of a GGUF file, made under `home` if needed. Raises CliError."""
    file = Path(os.path.abspath(file.expanduser()))  # noqa: PTH100 - links of a snapshot keep their names
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


def weights_of(folder: Path) -> Path:
    """Return where the weights of a loaded model's folder lie: the GGUF file that it links to, or itself."""
    link = folder / LINK
    return link.resolve() if link.is_symlink() else folder.resolve()


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
        if link.parents[1] != place and (link.readlink() == file or not link.exists()):
            shutil.rmtree(link.parents[1], ignore_errors=True)
