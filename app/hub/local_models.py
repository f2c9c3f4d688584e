"""Models on this disk: those in folders that others filled, to adopt them; deletion; disk use."""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmbox.engine.checkpoint.files import read_regular
from llmbox.engine.gguf.reader import PART, is_gguf

from ..config.paths import expand_home
from ..errors import CliError, Exit
from ..models.catalog import BUILTIN, HUB_ID, check_name, commit_of, hub_cache, not_a_folder
from ..models.gguf_folders import choose_quantization, folder_of, is_projector, quantizations
from ..models.registry import NameLookup, Registry, full_name
from .cache_layout import INCOMPLETE, Repo, repositories

MOST_MANIFEST = 1_000_000
"""Largest manifest of Ollama's store to read, in bytes."""


@dataclass(frozen=True, slots=True)
class AdoptableModel:
    name: str
    path: Path
    is_cache: bool


def find_adoptable(place: Path, gguf_home: Path | None = None) -> list[AdoptableModel]:
    """Return the models at a place: folders of checkpoints, caches, and GGUF files where there is a
    `gguf_home` for their folders. Raises CliError (exit 4) when there is nothing that could be served.
    """
    folder = expand_home(place).resolve()
    if not folder.exists():
        raise CliError(
            f"{folder} does not exist", "nothing is there to adopt", "name a folder", Exit.NOT_FOUND
        )
    if gguf_home is not None and folder.is_file() and is_gguf(folder):
        return [_adoptable_gguf(folder, gguf_home)]
    if not folder.is_dir():
        raise not_a_folder(folder)
    if _is_model(folder):
        return [AdoptableModel(folder.name, folder, is_cache=False)]
    for cache in (folder, folder / "hub"):
        if any(path.is_dir() for path in cache.glob("models--*--*")):
            return [AdoptableModel(str(cache), cache, is_cache=True)]
    found = [
        AdoptableModel(path.relative_to(folder).as_posix(), path, is_cache=False)
        for path in _entries(folder, 2)
        if _is_model(path)
    ]
    if gguf_home is not None:
        found += _ollama_models(folder, gguf_home) or _gguf_models(folder, gguf_home)
    if found:
        return found
    raise CliError(
        f"{folder} has no model that can be served",
        "no config.json with *.safetensors, and no GGUF file, in it or below it",
        "name a Hugging Face cache, or a folder with config.json, *.safetensors and tokenizer.json",
        Exit.NOT_FOUND,
    )


def _gguf_models(folder: Path, home: Path) -> list[AdoptableModel]:
    """Return the GGUF files in a folder and two levels below, as LM Studio keeps them. Files that cannot be
    served are left out if others can. Raises CliError where none can.
    """
    found, first = [], None
    for file in sorted(path for path in _entries(folder, 3) if path.suffix == ".gguf"):
        part = PART.search(file.name)
        if is_projector(file.name) or (part is not None and int(part[1]) > 1):
            continue
        try:
            found.append(_adoptable_gguf(file, home))
        except CliError as error:
            first = first or error
    if first is not None and not found:
        raise first
    return found


def _ollama_models(folder: Path, home: Path) -> list[AdoptableModel]:
    """Return the models of Ollama's store, by its manifests. What cannot be served is left out."""
    found = []
    for manifest in sorted(path for path in folder.glob("manifests/*/*/*/*") if path.is_file()):
        try:
            layers = json.loads(read_regular(manifest, MOST_MANIFEST))["layers"]
            (blob,) = _blobs(folder, layers, ".image.model")
            name = check_name(f"{manifest.parent.name}-{manifest.name}")
            made = folder_of(blob, home, beside=_blobs(folder, layers, ".image.projector"))
            found.append(AdoptableModel(name, made, is_cache=False))
        except (CliError, OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _blobs(folder: Path, layers: list[dict[str, Any]], kind: str) -> list[Path]:
    found = (str(layer["digest"]) for layer in layers if layer["mediaType"].endswith(kind))
    return [folder / "blobs" / digest.replace(":", "-") for digest in found]


def _adoptable_gguf(file: Path, home: Path) -> AdoptableModel:
    made = folder_of(file, home)
    return AdoptableModel(made.name, made, is_cache=False)


def _entries(folder: Path, depth: int) -> list[Path]:
    """List what is in a folder, level by level. Folders that cannot be read (`lost+found`) or vanish
    meanwhile count as empty.
    """
    found, level = [], [folder]
    for _ in range(depth):
        children: list[Path] = []
        for each in level:
            with contextlib.suppress(OSError):  # a file, too
                children += sorted(each.iterdir())
        found += children
        level = children
    return found


def _is_model(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return False


@dataclass(frozen=True, slots=True)
class RemovableModel:
    """Files that `rm` would delete. `repo` is None for an adopted folder, which is only forgotten."""

    name: str
    folder: Path
    repo: Repo | None
    commit: str | None = None
    """Commit, where one revision only is removed."""
    links: tuple[Path, ...] = ()
    """Files in the snapshots of a repository of GGUF files, where one quantization only is removed."""

    @property
    def size(self) -> int:
        """Bytes of the files."""
        if not self.links:
            return folder_size(self.folder)
        return sum(path.stat().st_size for path in {link.resolve() for link in self.links} if path.exists())


@dataclass(frozen=True, slots=True)
class RemovedModel:
    name: str
    freed: int
    forgotten: bool
    """True for adopted files, which stay."""


def find_removable(name: str, environ: Mapping[str, str], names: NameLookup) -> RemovableModel:
    """Find the files of a model. Raises CliError: exit 2 for a path and the like, 4 for an absent model."""
    if name == BUILTIN:
        raise CliError("builtin cannot be deleted", "it is part of llmbox", "", Exit.DENIED)
    if (alias := names.aliases.get(name)) is not None:
        raise CliError(
            f"{name} is an alias of {alias.model}", "only models are deleted", f"llmbox alias rm {name}"
        )
    if (place := names.directories.get(name)) is not None:
        return RemovableModel(name, Path(place), None)
    match = HUB_ID.fullmatch(full_name(name))
    if match is None or ".." in name or "--" in name:
        if "/" not in name:
            raise _not_found(name)
        raise CliError(
            f"{name!r} is not a model of the cache",
            "delete folders that were not adopted yourself",
            "llmbox ls",
            Exit.USAGE,
        )
    for cache in [hub_cache(environ), *map(Path, names.caches)]:
        repo = Repo(cache, match["repo"])
        if not repo.folder.is_dir():
            continue
        if match["quantization"] is not None:
            if (found := _quantization_in(repo, match, name)) is not None:
                return found
            continue
        if match["revision"] is None:
            return RemovableModel(name, repo.folder, repo)
        commit = commit_of(repo.folder, match["revision"])
        if commit is not None and repo.snapshot(commit).is_dir():
            return RemovableModel(name, repo.folder, repo, commit)
    raise _not_found(name)


def _quantization_in(repo: Repo, match: re.Match[str], name: str) -> RemovableModel | None:
    """Find the files of one quantization, in all snapshots or in that of the revision. Raises CliError where
    several models of a snapshot are of it.
    """
    commits = repo.revisions()
    if match["revision"] is not None:
        commits = tuple(each for each in commits if each == commit_of(repo.folder, match["revision"]))
    found = list[Path]()
    for commit in commits:
        snapshot = repo.snapshot(commit)
        names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]
        if match["quantization"].upper() in quantizations(names):
            files = choose_quantization(repo.name, names, match["quantization"])
            found += [snapshot / file for file in files]
    return RemovableModel(name, repo.folder, repo, links=tuple(found)) if found else None


def _not_found(name: str) -> CliError:
    return CliError(
        f"{name} is not a model on this disk",
        "only downloaded and adopted models are deleted; delete other folders yourself",
        "llmbox ls",
        Exit.NOT_FOUND,
    )


def remove(found: RemovableModel, registry: Registry) -> RemovedModel:
    try:
        if found.repo is None:
            registry.forget_directory(found.name)
            return RemovedModel(found.name, 0, forgotten=True)
        if found.links:
            freed = found.repo.delete_files(found.links)
        elif found.commit is None:
            freed = found.repo.delete()
        else:
            freed = found.repo.delete_revision(found.commit)
    except OSError as error:
        raise CliError(
            f"cannot delete {found.name}", error.strerror or str(error), "check the folder's owner and mode"
        ) from error
    return RemovedModel(found.name, freed, forgotten=False)


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Disk use of one model. `partial` is in downloads that are not finished."""

    name: str
    source: str
    size: int
    partial: int
    revisions: int
    path: Path


def disk_use(environ: Mapping[str, str], names: NameLookup) -> list[DiskUse]:
    """Return the disk use of all models, largest first."""
    found = []
    for cache in [hub_cache(environ), *map(Path, names.caches)]:
        for repo in repositories(cache):
            usage = repo.usage()
            found.append(
                DiskUse(repo.name, "hub", usage.size, usage.partial, len(usage.revisions), repo.folder)
            )
    for name, place in names.directories.items():
        size = folder_size(Path(place))
        found.append(DiskUse(name, "adopted", size, 0, 1, Path(place)))
    return sorted(found, key=lambda taken: -(taken.size + taken.partial))


def folder_size(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and not path.name.endswith(INCOMPLETE):
                total += path.stat().st_size
    return total
