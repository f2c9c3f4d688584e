"""Deletion of models from this disk, and their disk use."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CliError, Exit
from ..models.catalog import BUILTIN, HUB_ID, commit_of, hub_cache
from ..models.gguf_folders import choose_quantization, quantizations
from ..models.registry import NameLookup, Registry, full_name
from .cache_layout import INCOMPLETE, Repo, repositories


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
