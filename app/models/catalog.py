"""Catalog of the models on this disk, and the resolution of names that users give.

`builtin`              the demo model inside the package
an alias               its model; an adopted folder's name: that folder (`registry`)
a directory            served under its folder's name
a short name           `qwen3:4b`: the repository that `recommended` names
`org/name[@revision]`  a snapshot in the Hugging Face cache or in an adopted one, laid out as huggingface_hub
                       does (importing that library takes 0.3 s: the few lines that read it are ours)

Nothing is downloaded here. Names follow closed patterns and every path is resolved and checked to stay inside
its folder: a name never leads anywhere else.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmbox.engine.checkpoint.files import parse_json, read_regular
from llmbox.engine.gguf.folder import gguf_of
from llmbox.engine.gguf.reader import is_gguf

from ..config.paths import expand_home
from ..errors import CliError, Exit
from ..util.formatting import did_you_mean
from .gguf_folders import choose_quantization, folder_of, is_projector, quantizations
from .registry import NameLookup, full_name, short_names

Source = Literal["builtin", "directory", "hub"]

BUILTIN = "builtin"
BUILTIN_DIR = Path(__file__).parents[1] / "assets" / "builtin"
CONFIG_LIMIT = 4_000_000
"""Largest config.json to parse, in bytes; real ones have a few thousand."""

WEIGHT_SUFFIXES = (".gguf", ".safetensors")

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
HUB_ID = re.compile(
    rf"(?!.*(?:\.\.|--))(?P<repo>{_PART}/{_PART})(?<!\.git)(?::(?P<quantization>[A-Za-z0-9][A-Za-z0-9_-]{{0,31}}))?"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9_./-]{0,199}))?"
)
"""A model of the hub; of a repository of GGUF files one quantization, as org/name:Q4_K_M. The hub has no
repository whose name ends in .git."""
NAME = re.compile(
    rf"{_PART}(?:/{_PART}(?::[A-Za-z0-9][A-Za-z0-9_-]{{0,31}})?)?(?:@[A-Za-z0-9][A-Za-z0-9_./-]{{0,199}})?"
)
"""A name under which models are served."""
_CLONE_URL = re.compile(
    r"(?:(?:https?://|git@)?[\w.-]+\.\w+[/:])?(?P<id>[^/@:]+/[^/@:]+?)(?:\.git)?/?(?P<revision>@.+)?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Model on disk. `name` is what clients call it; `ref` finds it again from any working directory."""

    name: str
    path: Path
    source: Source
    revision: str | None = None
    registered: bool = False
    """The daemon finds a directory by this name: it was adopted, or is in memory."""

    @property
    def ref(self) -> str:
        return str(self.path) if self.source == "directory" else self.name

    @property
    def load_ref(self) -> str:
        """Argument of a load that serves the model under `name`."""
        return self.name if self.registered else self.ref

    def is_target(self, text: str) -> bool:
        """Return whether an alias of `text` stands for this model."""
        return text in {self.name, str(self.path)}


@dataclass(frozen=True, slots=True)
class DiskModel:
    """Model on disk as lists show it. `size` in bytes, `modified` in Unix seconds."""

    ref: ModelRef
    size: int
    modified: float
    architecture: str | None
    servable: bool
    """Has a config and weights, in safetensors or GGUF. The engine decides whether it can compute them."""


def resolve(
    text: str,
    environ: Mapping[str, str],
    names: NameLookup | None = None,
    memory: Mapping[str, ModelRef] | None = None,
) -> ModelRef:
    """Find the model that a name given by a user means.

    `memory`: models in memory by each of their names. They take precedence, as for requests.

    Raises CliError: exit 2 for an invalid name, exit 4 for a model that is not on disk.
    """
    if memory and (served_now := memory.get(text)) is not None:
        return served_now
    names = names or NameLookup()
    if (alias := names.aliases.get(text)) is not None:
        text = alias.model
    if text == BUILTIN:
        return _builtin()
    if (place := names.directories.get(text)) is not None:
        return ModelRef(text, directory(Path(place)).path, "directory", registered=True)
    if (
        text.startswith(("/", "./", "../", "~"))
        or text in {".", ".."}
        or (names.has_working_directory and _is_path(text))
    ):
        path = expand_home(Path(text))
        if names.gguf_home is not None and path.is_file() and is_gguf(path):
            return directory(folder_of(path, names.gguf_home))
        return directory(path)
    return _resolve_id(text, environ, names, memory)


def _resolve_id(
    asked: str, environ: Mapping[str, str], names: NameLookup, memory: Mapping[str, ModelRef] | None
) -> ModelRef:
    """Find the snapshot of a short name or of an id of the hub. Raises CliError."""
    text = full_name(asked)
    match = HUB_ID.fullmatch(text)
    if match is None:
        raise CliError(
            f"{text!r} does not name a model",
            "a model is builtin, a directory, a GGUF file, org/name[@revision], or a name like qwen3:4b",
            f"{likely_id(text) or did_you_mean(text, _all_names(environ, names, memory))}"
            "see what is on disk: llmbox ls; what suits this machine: llmbox search",
            Exit.USAGE if "/" in text else Exit.NOT_FOUND,
        )
    caches = [hub_cache(environ), *map(Path, names.caches)]
    try:
        return _in_caches(text, match, caches, names.gguf_home)
    except CliError as error:
        if error.exit == Exit.NOT_FOUND:
            is_whole = asked == text and match["quantization"] is None
            meant = did_you_mean(match["repo"], _all_names(environ, names, memory)) if is_whole else ""
            error.fix = meant + error.fix
        raise


def _all_names(
    environ: Mapping[str, str], names: NameLookup, memory: Mapping[str, ModelRef] | None
) -> set[str]:
    """All names that could have been meant, for a suggestion. Folders are listed, not read."""
    caches = [hub_cache(environ), *map(Path, names.caches)]
    repos = (repo.name for cache in caches if cache.is_dir() for repo in cache.glob("models--*--*"))
    fetched = {repo.removeprefix("models--").replace("--", "/", 1) for repo in repos}
    return {BUILTIN, *names.aliases, *names.directories, *(memory or ()), *fetched, *short_names()}


def _is_path(text: str) -> bool:
    """Return whether a word without a leading `./` names a model of the working directory."""
    return Path(text, "config.json").is_file() or (
        text.lower().endswith(WEIGHT_SUFFIXES) and Path(text).exists()
    )


def likely_id(text: str) -> str:
    """Return `"did you mean org/name? "` for the address of a repository, else an empty string."""
    match = _CLONE_URL.fullmatch(text[:400])
    wanted = match["id"] + (match["revision"] or "") if match else ""
    return f"did you mean {wanted}? " if wanted != text and HUB_ID.fullmatch(wanted) else ""


def find_served(name: str, environ: Mapping[str, str], names: NameLookup) -> ModelRef | None:
    """Find the model that an API client may name: never by path. None if it is not on this disk."""
    try:
        if name in names.aliases or name in names.directories or name == BUILTIN:
            return resolve(name, environ, names)
        name = full_name(name)
        match = HUB_ID.fullmatch(name)
        if match is None:
            return None
        caches = [hub_cache(environ), *map(Path, names.caches)]
        return _in_caches(name, match, caches, names.gguf_home)
    except (CliError, OSError):
        return None


def in_memory(name: str, path: Path) -> ModelRef:
    """Reference to a model that the daemon serves as `name`."""
    if path == BUILTIN_DIR:
        return ModelRef(name, path, "builtin")
    if path.parent.name == "snapshots" and HUB_ID.fullmatch(name) and _COMMIT.fullmatch(path.name):
        return ModelRef(name, path, "hub", path.name)
    return ModelRef(name, path, "directory", registered=True)


def _in_caches(name: str, match: re.Match[str], caches: list[Path], gguf_home: Path | None) -> ModelRef:
    first: CliError | None = None
    for cache in caches:
        try:
            found = _snapshot(name, match["repo"], match["revision"], cache)
            return found if match["quantization"] is None else _of_gguf(found, match, gguf_home)
        except CliError as error:
            first = first or error
            if error.exit != Exit.NOT_FOUND:
                raise
    assert first is not None
    raise first


def _of_gguf(snapshot: ModelRef, match: re.Match[str], gguf_home: Path | None) -> ModelRef:
    """Return the model folder of one quantization in a snapshot of GGUF files. Raises CliError."""
    names = [file.relative_to(snapshot.path).as_posix() for file in snapshot.path.rglob("*.gguf")]
    try:
        files = choose_quantization(match["repo"], names, match["quantization"])
    except CliError as error:
        raise CliError(
            f"{snapshot.name} is not on this disk",
            f"of this repository {error.why.removeprefix('it has ')} are there" if names else error.why,
            f"get it first: llmbox pull {snapshot.name}",
            Exit.NOT_FOUND,
        ) from None
    if gguf_home is None:
        raise CliError(f"{snapshot.name} cannot be served", "it is a GGUF file", "llmbox ls", Exit.FAILED)
    beside = [snapshot.path / name for name in names if is_projector(name)]
    return replace(snapshot, path=folder_of(snapshot.path / files[0], gguf_home, beside=beside))


def directory(path: Path) -> ModelRef:
    folder = expand_home(path).resolve()
    if not folder.exists():
        raise CliError(
            f"{folder} does not exist", "no model is there", "see what is on disk: llmbox ls", Exit.NOT_FOUND
        )
    if not folder.is_dir():
        raise not_a_folder(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise CliError(
            f"{folder} has no model",
            "config.json is not a regular file" if config.exists() else "config.json is missing",
            "name a directory in Hugging Face layout: config.json, *.safetensors, tokenizer.json",
            Exit.NOT_FOUND,
        )
    return ModelRef(folder.name, folder, "directory")


def not_a_folder(file: Path) -> CliError:
    if file.suffix.lower() == ".gguf" and not is_gguf(file):
        return CliError(
            f"{file} is not a GGUF file",
            "its header is missing: it is damaged or its download was incomplete",
            "download it again",
            Exit.USAGE,
        )
    return CliError(
        f"{file} is not a directory",
        "a model is a GGUF file, or a folder with config.json, *.safetensors and tokenizer.json",
        f"name the folder: {shlex.quote(str(file.parent))}",
        Exit.USAGE,
    )


def check_name(name: str, fix: str = "give it another: --alias NAME") -> str:
    """Return `name` if models may be served under it. Raises CliError otherwise."""
    if not NAME.fullmatch(name) or ".." in name:
        raise CliError(
            f"{name!r} cannot be a model's name",
            "names have letters, digits and . _ -, with at most one /",
            fix,
            Exit.USAGE,
        )
    return name


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Folder of huggingface_hub's cache, from the same variables in the same order."""
    if explicit := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return expand_home(Path(explicit))
    if home := environ.get("HF_HOME"):
        return expand_home(Path(home)) / "hub"
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expand_home(Path(cache)) / "huggingface" / "hub"


def on_disk(environ: Mapping[str, str], names: NameLookup | None = None) -> list[DiskModel]:
    """List the built-in model, then the Hugging Face cache by name, then the adopted models."""
    names = names or NameLookup()
    found = [describe(_builtin())] if BUILTIN_DIR.is_dir() else []
    for cache in [hub_cache(environ), *map(Path, names.caches)]:
        known = {model.ref.name for model in found}
        found += [model for model in _in_cache(cache, names.gguf_home) if model.ref.name not in known]
    for name, place in sorted(names.directories.items()):
        try:
            found.append(describe(ModelRef(name, directory(Path(place)).path, "directory", registered=True)))
        except (CliError, OSError):
            continue  # moved away, or a disk that is not mounted
    return found


def _in_cache(cache: Path, gguf_home: Path | None) -> list[DiskModel]:
    found = []
    repos = sorted(cache.glob("models--*--*")) if cache.is_dir() else []
    for repo in repos:
        name = repo.name.removeprefix("models--").replace("--", "/", 1)
        if HUB_ID.fullmatch(name) is None:
            continue
        try:
            snapshot = _snapshot(name, name, None, cache)
            files = [file.relative_to(snapshot.path).as_posix() for file in snapshot.path.rglob("*.gguf")]
            if files and not (snapshot.path / "config.json").is_file():
                for label in quantizations(files) if gguf_home is not None else ():
                    match = HUB_ID.fullmatch(text := f"{name}:{label}")
                    assert match is not None
                    found.append(describe(_in_caches(text, match, [cache], gguf_home)))
                continue
            found.append(describe(snapshot))
        except (CliError, OSError):
            continue  # a repository without the main snapshot: nothing that could be served by its bare name
    return found


def describe(ref: ModelRef) -> DiskModel:
    """Describe a model on disk from its config and file sizes."""
    files = [path for path in ref.path.rglob("*") if path.is_file()]
    config = read_config(ref.path)
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else config.get("model_type")
    return DiskModel(
        ref,
        sum(path.stat().st_size for path in files),
        max((path.stat().st_mtime for path in files), default=0.0),
        architecture if isinstance(architecture, str) else None,
        bool(config)
        and (any(path.suffix == ".safetensors" for path in files) or gguf_of(ref.path) is not None),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json for display. Empty when it is missing or broken; loading reports the problem."""
    path = folder / "config.json"
    try:
        data = parse_json(read_regular(path, CONFIG_LIMIT))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _builtin() -> ModelRef:
    if not (BUILTIN_DIR / "config.json").is_file():
        raise CliError(
            "the built-in model is missing",
            f"{BUILTIN_DIR} has no config.json",
            "install llmbox again",
            Exit.NOT_FOUND,
        )
    return ModelRef(BUILTIN, BUILTIN_DIR, "builtin")


def _snapshot(name: str, repo: str, revision: str | None, cache: Path) -> ModelRef:
    folder = cache / f"models--{repo.replace('/', '--')}"
    commit = commit_of(folder, revision)
    path = folder / "snapshots" / commit if commit else None
    if path is None or not path.is_dir():
        raise CliError(
            f"{name} is not on this disk",
            f"not in the Hugging Face cache {cache}",
            f"get it first: llmbox pull {name}",
            Exit.NOT_FOUND,
        )
    for file in _files_leaving(path, folder.resolve()):
        raise CliError(
            f"{name} is not safe to read",
            f"{file} links to a place outside of {folder}",
            "delete that repository from the cache and download it again",
            Exit.INTEGRITY,
        )
    return ModelRef(name, path.resolve(), "hub", commit)


def commit_of(folder: Path, revision: str | None) -> str | None:
    """Commit that a branch, a tag or a commit id stands for in the cache."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    reference = folder / "refs" / (revision or "main")
    if not reference.resolve().is_relative_to((folder / "refs").resolve()):
        return None
    try:
        text = read_regular(reference, 4096).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return text if _COMMIT.fullmatch(text) else None


def _files_leaving(snapshot: Path, repo: Path) -> Iterator[Path]:
    """Files whose link ends outside of the repository's own folder."""
    return (path for path in snapshot.rglob("*") if not path.resolve().is_relative_to(repo))
