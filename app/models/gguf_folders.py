"""Model folders of GGUF files, made in the data folder when a file is first named.

A folder holds what the file says of the model (config, tokenizer, chat template) and a link to it: the
weights stay where they are. It is made anew when the file changes, and by another version of llmbox where its
projector file was not read.
"""

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmbox import __version__
from llmbox.engine.checkpoint.safetensors import TensorEntry
from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.config import name_of
from llmbox.engine.gguf.folder import LINK, PROJECTOR_LINK, find_matrix, write_folder
from llmbox.engine.gguf.names import HEAD, SCORES, TABLE
from llmbox.engine.gguf.projector import has_tower
from llmbox.engine.gguf.reader import PART, is_gguf, read_gguf
from llmbox.engine.ipc.profile_messages import AskRows

from ..config.paths import expand_home
from ..errors import CliError, Exit

_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD[-_])?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE
)
NO_PROJECTOR = Path("none")
"""Word of a user who wants no images."""
_WIDTHS = ("F16", "BF16", "F32", "Q8_0")
_NAMELESS = ("", "model")
"""Names of projector files that name no model."""
_VERSION = "version"
"""File beside a folder with the version of llmbox that made it."""
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


def choose_projector(model: str, names: Sequence[str]) -> tuple[str | None, str]:
    """Return the projector file for a model among others by their names, or why none of several was chosen.

    That of the model's name is taken, else the only one, or one that names no model; of several widths that
    with 16 bits.
    """
    found = [name for name in names if is_projector(name) or len(names) == 1]
    if not found:
        return None, ""
    own = _core(PART.sub(".gguf", model))
    by_core: dict[str, list[str]] = {}
    for name in found:
        by_core.setdefault(_core(name), []).append(name)
    near = [core for core in by_core if core and (own.startswith(core) or core.startswith(own))]
    cores = [max(near, key=len)] if near else [core for core in by_core if core in _NAMELESS]
    if not cores and len(by_core) > 1:
        listed = ", ".join(sorted(Path(name).name for name in found))
        return (
            None,
            f"several projector files lie beside its GGUF file ({listed}): name one with --mmproj FILE",
        )
    return min(by_core[(cores or list(by_core))[0]], key=_width_order), ""


def _core(name: str) -> str:
    """Return the name of a model in that of a file: without `mmproj` and width."""
    stem = _QUANTIZATION.sub("", Path(name).stem).lower()
    return re.sub(r"(^|[-._])mmproj([-._]|$)", r"\1", stem).strip("-._")


def _width_order(name: str) -> tuple[int, str]:
    found = _QUANTIZATION.search(Path(name).stem)
    width = found[1].upper() if found else ""
    return (_WIDTHS.index(width) if width in _WIDTHS else len(_WIDTHS), name)


def folder_of(
    file: Path, home: Path, projector: Path | None = None, beside: Sequence[Path] | None = None
) -> Path:
    """Return the model folder of a GGUF file, made under `home` if needed. Raises CliError.

    `projector`: file with its vision tower, which then has to fit; `NO_PROJECTOR` for none. By default one of
    `beside`, or of the files that lie beside it; where that does not fit, the model cannot read images.
    """
    file = Path(os.path.abspath(expand_home(file)))  # noqa: PTH100 - links of a snapshot keep their names
    try:
        stamp, is_asked = _stamp(file), projector is not None
        projector, problem = _find_projector(file, projector, beside)
        place = home / _digest(stamp)[:12]
        if projector is not None or problem:
            own = _stamp(projector) if projector else problem
            place = place.with_name(f"{place.name}-{_digest(own)[:8]}")
        made = next((each for each in place.glob("*") if (each / LINK).is_symlink()), None)
        is_unread = made is not None and projector is not None and not (made / PROJECTOR_LINK).is_symlink()
        if is_unread and (is_asked or _version_of(place) != __version__):
            made = None  # the error says why, or this version reads it
        return made or _make(file, place, projector, problem, is_asked=is_asked)
    except ModelError as error:
        raise CliError(
            f"{file.name} cannot be served", str(error), "docs/models.md lists what is supported", Exit.FAILED
        ) from None
    except OSError as error:
        raise CliError(
            f"{file.name} cannot be served",
            f"{error.filename or file}: {error.strerror or error}",
            f"the file must be readable, and {home} writable with some space",
            Exit.FAILED,
        ) from None


def _find_projector(file: Path, asked: Path | None, beside: Sequence[Path] | None) -> tuple[Path | None, str]:
    """Return the projector file, or the reason why there is none, empty where none is missed."""
    if asked == NO_PROJECTOR:
        return None, "it was loaded without a projector file (--mmproj none)"
    problem = ""
    if asked is None:
        if beside is None:
            beside = [each for each in file.parent.glob("*.gguf") if is_projector(each.name)]
        chosen, problem = choose_projector(file.name, [str(each) for each in beside])
        asked = None if chosen is None else Path(chosen)
    return None if asked is None else Path(os.path.abspath(expand_home(asked))), problem  # noqa: PTH100


def folder_with_projector(file: Path, projector: Path, home: Path | None) -> Path:
    """Do as `folder_of` with the file that a user names after --mmproj. Raises CliError."""
    file = expand_home(file)
    if home is None or not file.is_file() or not is_gguf(file):
        raise CliError(
            "--mmproj goes with a GGUF file",
            f"{file} is none",
            "name the file of the language model: llmbox up MODEL.gguf --mmproj MMPROJ.gguf",
            Exit.USAGE,
        )
    return folder_of(file, home, projector)


def _stamp(file: Path) -> str:
    status = file.stat()
    return f"{file}\0{status.st_size}\0{status.st_mtime_ns}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def weights_of(folder: Path) -> Path:
    """Return where the weights of a loaded model's folder lie: the GGUF file that it links to, or itself."""
    link = folder / LINK
    return link.resolve() if link.is_symlink() else folder.resolve()


def score_rows(folder: Path, rows: tuple[int, ...]) -> AskRows:
    """Return the question for rows of scores in the GGUF file of a folder. Raises ModelError."""
    return _ask(find_matrix(folder, SCORES), rows)


def head_rows(folder: Path, rows: tuple[int, ...], *, is_tied: bool) -> AskRows:
    """Return the question for rows of the head; `is_tied`: of the input embedding. Raises ModelError."""
    return _ask(find_matrix(folder, TABLE if is_tied else HEAD), rows)


def _ask(matrix: TensorEntry, rows: tuple[int, ...]) -> AskRows:
    return AskRows(
        file=str(matrix.file),
        tensor=matrix.name,
        dtype=matrix.dtype,
        shape=matrix.shape,
        offset=matrix.offset,
        nbytes=matrix.nbytes,
        rows=rows,
    )


def _make(file: Path, place: Path, projector: Path | None, problem: str, *, is_asked: bool) -> Path:
    from ..text.tokenizer.gguf_tokenizer import write_tokenizer  # noqa: PLC0415 - the library is slow to import

    gguf = read_gguf(file)
    if projector is None and not problem and has_tower(gguf):
        projector = file
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = Path(tempfile.mkdtemp(dir=place.parent, prefix=".making-"))
    try:
        folder = part / name_of(gguf)
        folder.mkdir()
        try:
            write_folder(gguf, folder, projector, problem)
        except ModelError as error:
            if projector is None or is_asked:
                raise
            write_folder(gguf, folder, problem=f"its projector file is not read: {error}")
        write_tokenizer(gguf.metadata, folder)
        (part / _VERSION).write_text(__version__, encoding="utf-8")
        _put(part, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _forget_older(file, place)
    return place / folder.name


def _put(part: Path, place: Path) -> None:
    """Move a new folder to its place, where an older one may be. Raises OSError."""
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=".making-"))
    try:
        with contextlib.suppress(FileNotFoundError):
            place.rename(aside / "old")
        try:
            part.rename(place)
        except OSError:
            if not place.is_dir():  # another command may have been a moment faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _version_of(place: Path) -> str:
    try:
        return (place / _VERSION).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _forget_older(file: Path, place: Path) -> None:
    """Remove folders of earlier versions of the file or of its projector, and of files that are gone."""
    own, version = _projector_of(place), place.name[:12]
    for link in place.parent.glob(f"[!.]*/*/{LINK}"):
        other = link.parents[1]
        projector = _projector_of(other)
        is_older = other.name[:12] != version or (projector is not None and projector == own)
        if other != place and ((link.readlink() == file and is_older) or not link.exists()):
            shutil.rmtree(other, ignore_errors=True)


def _projector_of(place: Path) -> Path | None:
    return next((link.readlink() for link in place.glob(f"*/{PROJECTOR_LINK}")), None)
