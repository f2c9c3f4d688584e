"""Names of models: recommended ones with their repositories of the hub, and those that the user defined,
which are aliases with their parameters and adopted models.

`app/assets/recommended.json` has one model a line: name, repository, purpose, license, published parameter
count, and the fields of its config.json that decide its memory. A name is `family:size`; the family alone
means its default size. What the hub says of these repositories is kept in a file of the cache once somebody
asks it (`llmbox search --refresh`), and counts from then on.

Names of the user are one JSON file in the data folder. The command line and the daemon write it under a lock,
by an atomic replace. Readers check the file's stamp first, so a change takes effect at once and without a
reload.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..errors import CliError, Exit
from ..util.atomic_file import locked, write_whole
from ..util.formatting import did_you_mean

Purpose = Literal["chat", "code", "vision", "embedding", "reranking", "tiny"]
FILE = Path(__file__).parents[1] / "assets" / "recommended.json"
PUBLISHED_BYTES = 2
"""Bytes of a published parameter: bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendedModel:
    name: str
    """Short name, `family:size`."""
    default: bool
    """The family's name alone means this size."""
    repo: str
    purpose: Purpose
    license: str
    gated: bool
    """The hub asks for a token and the acceptance of the license."""
    params: int
    config: dict[str, Any]
    """Fields of config.json that decide shape and memory."""
    files: int = 0
    """Bytes of the files to download, where they are quantized or the hub gives them; 0: two a parameter."""
    unused: int = 0
    """Parameters in the files that are neither the language model nor its vision tower: layers that draft,
    audio towers.
    """

    @property
    def download_bytes(self) -> int:
        return self.files or self.params * PUBLISHED_BYTES

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    @property
    def reads_images(self) -> bool:
        return "vision_config" in self.config


@cache
def recommended() -> tuple[RecommendedModel, ...]:
    """Return all recommended models, families together, the smallest of a family first."""
    return tuple(RecommendedModel(**row) for row in json.loads(FILE.read_text()))


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFacts:
    """Facts of a recommended repository, from the hub."""

    license: str
    gated: bool
    params: int
    files: int
    """Bytes of the files to download."""
    config: dict[str, Any]


def read_hub_facts(file: Path) -> dict[str, HubFacts]:
    """Return what the hub was asked for, by repository; nothing if it was not, or the file is damaged."""
    import msgspec  # noqa: PLC0415 - the command line starts without it

    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, HubFacts])
    except (OSError, msgspec.MsgspecError):
        return {}


def keep_hub_facts(file: Path, found: Mapping[str, HubFacts]) -> None:
    """Keep facts beside those of an earlier time. Raises OSError."""
    import msgspec  # noqa: PLC0415 - the command line starts without it

    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(file, msgspec.json.encode(read_hub_facts(file) | dict(found)))


def with_hub_facts(model: RecommendedModel, facts: HubFacts | None) -> RecommendedModel:
    if facts is None:
        return model
    return replace(
        model,
        license=facts.license or model.license,
        gated=facts.gated,
        params=facts.params,
        files=facts.files,
        config=facts.config,
    )


@cache
def _by_name() -> dict[str, RecommendedModel]:
    models = recommended()
    families = {model.family: model for model in models if model.default}
    return {model.name: model for model in models} | families


def full_name(text: str) -> str:
    """Return the repository that a short name means, ignoring case; other text is returned unchanged."""
    found = _by_name().get(text.lower())
    return text if found is None else found.repo


def short_names() -> set[str]:
    """Return every short name, for suggestions."""
    return set(_by_name())


def family_of(repo: str) -> str:
    """Return the family of a recommended repository; empty for others."""
    return next((model.family for model in recommended() if model.repo.lower() == repo.lower()), "")


log = logging.getLogger("llmbox.daemon")

SYSTEM_LIMIT = 32_000
"""Maximum length of an alias's system prompt, in characters."""

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (1e-9, 1),
    "top_k": (0, 1 << 30),
    "min_p": (0, 1),
    "repetition_penalty": (1e-9, 2),
    "ctx": (16, 1 << 26),
}
"""Parameters that an alias may have besides `system`."""
_WHOLE = {"top_k", "ctx"}


@dataclass(frozen=True, slots=True)
class Alias:
    """Alias of `model`. The parameters apply where a request does not set them; `ctx` limits the context."""

    model: str
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    adapter: str = ""
    """LoRA adapter of `model` that the name stands for: a folder in `Registry.adapters_home`, named by a
    digest of its content. Empty: none.
    """

    @property
    def context(self) -> int | None:
        value = self.parameters.get("ctx")
        return int(value) if value is not None else None

    @property
    def system(self) -> str | None:
        value = self.parameters.get("system")
        return str(value) if value is not None else None

    @property
    def sampling(self) -> dict[str, float]:
        return {k: float(v) for k, v in self.parameters.items() if k in RANGES and k != "ctx"}


@dataclass(frozen=True, slots=True)
class NameLookup:
    """Contents of the registry file."""

    aliases: Mapping[str, Alias] = field(default_factory=dict)
    caches: tuple[str, ...] = ()
    """Further Hugging Face caches."""
    directories: Mapping[str, str] = field(default_factory=dict)
    """Model folders by the name they are served under."""
    gguf_home: Path | None = None
    """Folder for the model folders of GGUF files; None: they cannot be served here."""
    has_working_directory: bool = True
    """A word such as `org/name` may mean a folder of the working directory. Not in the daemon, whose working
    directory no user chose."""


class Registry:
    """Registry file. It is changed under a lock and read again when its stamp has changed."""

    def __init__(self, file: Path, *, has_working_directory: bool = True) -> None:
        """`has_working_directory`: see `NameLookup`."""
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        self._nothing = NameLookup(
            gguf_home=file.parent / "gguf", has_working_directory=has_working_directory
        )
        self._names = self._nothing
        self._complained = False

    @property
    def adapters_home(self) -> Path:
        """Folder with a folder for each adapter."""
        return self._file.parent / "adapters"

    def read(self) -> NameLookup:
        """Read the file. Empty without one. Raises CliError when it is broken."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            self._stamp, self._names = None, self._nothing
            return self._names
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp != self._stamp:
            self._names = replace(
                _parse(self._file),
                gguf_home=self._nothing.gguf_home,
                has_working_directory=self._nothing.has_working_directory,
            )
            self._stamp = stamp
        return self._names

    def read_or_nothing(self) -> NameLookup:
        """Read the file for a request, which a broken file must not fail. The log reports the problem
        once.
        """
        try:
            names = self.read()
        except CliError as error:
            if not self._complained:
                log.error("%s: %s; %s", error.what, error.why, error.fix)  # noqa: TRY400
            self._complained = True
            return self._nothing
        self._complained = False
        return names

    def change(self, edit: Callable[[NameLookup], NameLookup]) -> NameLookup:
        """Read, edit and write the file under the lock, and delete the files of adapters that the edit
        removed before another one can add them.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(self._file.with_suffix(".lock")):
            before = self.read()
            names = edit(before)
            data = asdict(names)
            kept = {name: data[name] for name in ("aliases", "caches", "directories")}
            for alias in kept["aliases"].values():
                if not alias["adapter"]:
                    del alias["adapter"]
            try:
                write_whole(self._file, f"{json.dumps({'schema': 1, **kept}, indent=1)}\n".encode())
            except OSError as error:
                raise CliError(
                    f"cannot write {self._file}",
                    error.strerror or str(error),
                    "free some space, then try again",
                ) from error
            for digest in _adapters(before) - _adapters(names):
                shutil.rmtree(self.adapters_home / digest, ignore_errors=True)
        return names

    def set_alias(self, name: str, alias: Alias) -> None:
        self.change(lambda names: replace(names, aliases={**names.aliases, name: alias}))

    def remove_alias(self, name: str) -> None:
        def edit(names: NameLookup) -> NameLookup:
            if name not in names.aliases:
                hint = did_you_mean(name, names.aliases)
                raise CliError(
                    f"no alias {name}", "it is not in the list", f"{hint}llmbox alias ls", Exit.NOT_FOUND
                )
            return replace(names, aliases={k: v for k, v in names.aliases.items() if k != name})

        self.change(edit)

    def adopt_cache(self, folder: Path) -> None:
        def edit(names: NameLookup) -> NameLookup:
            return replace(names, caches=tuple(dict.fromkeys((*names.caches, str(folder)))))

        self.change(edit)

    def adopt_directory(self, name: str, folder: Path) -> None:
        def edit(names: NameLookup) -> NameLookup:
            taken = names.directories.get(name)
            if taken is not None and taken != str(folder):
                raise CliError(
                    f"the name {name} is taken",
                    f"it stands for {taken}",
                    f"llmbox rm {name}, which forgets that one and deletes nothing, then again",
                    Exit.CONFLICT,
                )
            return replace(names, directories={**names.directories, name: str(folder)})

        self.change(edit)

    def forget_directory(self, name: str) -> None:
        def edit(names: NameLookup) -> NameLookup:
            return replace(names, directories={k: v for k, v in names.directories.items() if k != name})

        self.change(edit)


def _adapters(names: NameLookup) -> set[str]:
    return {alias.adapter for alias in names.aliases.values() if alias.adapter}


def parse_parameters(texts: list[str]) -> dict[str, float | int | str]:
    """Parse `k=v` words. Raises CliError (exit 2) naming the word and the range."""
    found: dict[str, float | int | str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        key = {"context": "ctx"}.get(key, key.replace("-", "_"))
        if not sign:
            raise _bad(text, "a parameter is written k=v")
        found[key] = check_parameter(key, value)
    return found


def check_parameter(key: str, value: object) -> float | int | str:
    """Check the value of one alias parameter. Raises CliError (exit 2)."""
    if key == "system":
        if not isinstance(value, str) or not 0 < len(value) <= SYSTEM_LIMIT:
            raise _bad(key, f"a system prompt is a text of at most {SYSTEM_LIMIT} characters")
        return value
    if key not in RANGES:
        raise _bad(key, f"an alias takes {', '.join([*RANGES, 'system'])}")
    low, high = RANGES[key]
    try:
        number = float(value) if isinstance(value, str | int | float) else float("nan")
    except ValueError:
        number = float("nan")
    if not low <= number <= high or (key in _WHOLE and number != int(number)):
        kind = "a whole number" if key in _WHOLE else "a number"
        raise _bad(f"{key}={value}", f"{key} is {kind} from {low:g} to {high:g}")
    return int(number) if key in _WHOLE else number


def _bad(word: str, why: str) -> CliError:
    return CliError(
        f"{word[:100]!r} is not a parameter of an alias", why, "llmbox alias set --help", Exit.USAGE
    )


def _checked_digest(text: object) -> str:
    if not isinstance(text, str) or not re.fullmatch(r"([0-9a-f]{32})?", text):
        raise ValueError(f"{text!r} is not the digest of an adapter")
    return text


def _parse(file: Path) -> NameLookup:
    try:
        data: dict[str, Any] = json.loads(file.read_bytes())
        aliases = {
            str(name): Alias(
                str(value["model"]),
                {k: check_parameter(k, v) for k, v in value["parameters"].items()},
                _checked_digest(value.get("adapter", "")),
            )
            for name, value in data["aliases"].items()
        }
        directories = {str(name): str(path) for name, path in data["directories"].items()}
        return NameLookup(aliases, tuple(map(str, data["caches"])), directories)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CliError) as error:
        raise CliError(
            f"{file} is broken",
            f"{type(error).__name__}: {error}",
            "fix it, or move it away and set aliases and adopted folders again",
        ) from None
