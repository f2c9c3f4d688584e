"""Repository listing at one commit, and the choice of files that serving needs."""

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from llmbox.engine.checkpoint.files import parse_json
from llmbox.engine.checkpoint.quantized_layout import MODELOPT_FILE
from llmbox.engine.model_config.encoders.config import DENSE_FILES, MODULES_FILE, POOLING_FILE, PROMPTS_FILE

from ..errors import CliError
from ..models.gguf_folders import choose_projector, choose_quantization, is_projector, quantizations
from . import errors
from .errors import HubError
from .http import USER_AGENT, HubHttpClient, require_reachable

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ENDPOINT = "https://huggingface.co"
INDEX = "model.safetensors.index.json"
SINGLE, MEDUSA = "model.safetensors", "medusa_lm_head.safetensors"
INDEX_LIMIT = 50_000_000
CONFIG_LIMIT = 4_000_000
SMALL_FILES = (
    "config.json",
    MODELOPT_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    MODULES_FILE,
    POOLING_FILE,
    PROMPTS_FILE,
    *DENSE_FILES,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def import_client() -> Any:
    """Import the hub's own client, late (0.3 s) and only here, with its unasked requests switched off.

    By default it fetches a list of programs that may have started this process (`/api/agent-harnesses`), and
    names the one it finds and the version of torch in every request.
    """
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # read by the import below, and by child processes
    import huggingface_hub.constants  # noqa: PLC0415
    import huggingface_hub.errors  # noqa: PLC0415

    # Something else in this process may have imported it before.
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    return huggingface_hub


@dataclass(frozen=True, slots=True)
class RepoFile:
    """`etag` names the content: the sha256 of a large file, git's sha1 of a small one."""

    name: str
    size: int
    etag: str

    @property
    def by_sha256(self) -> bool:
        return len(self.etag) == 64


@dataclass(frozen=True, slots=True)
class RepoListing:
    repo: str
    commit: str
    files: tuple[RepoFile, ...]
    gated: bool
    quantization: str | None = None
    """Wanted one, of a repository of GGUF files."""
    license: str = ""
    """License that the repository names; empty if none."""

    def file(self, name: str) -> RepoFile | None:
        return next((file for file in self.files if file.name == name), None)


class Hub:
    """Client of the hub that the environment names. Every method may block and raises HubError."""

    def __init__(
        self,
        endpoint: str,
        token: str | None,
        *,
        offline: bool = False,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create a client. `note` is called with what a call waits for."""
        self.web = HubHttpClient(endpoint, token)
        self.offline = offline
        self.note = note

    @classmethod
    def of_environment(cls, note: Callable[[str], None] = lambda _: None) -> "Hub":
        """Build the client from HF_ENDPOINT, HF_TOKEN (or the token that `hf auth login` stored) and
        HF_HUB_OFFLINE.
        """
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        return cls(
            os.environ.get("HF_ENDPOINT") or ENDPOINT, import_client().get_token(), offline=offline, note=note
        )

    def require_online(self) -> None:
        if self.offline:
            raise errors.offline()
        require_reachable(self.web.endpoint, self.note)

    def list_files(self, repo: str, revision: str | None, quantization: str | None = None) -> RepoListing:
        self.require_online()
        what = repo if revision is None else f"{repo}@{revision}"
        with asking(self.web, what):
            info = self._api().model_info(repo, revision=revision, files_metadata=True, timeout=30)
            if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
                raise HubError("hub_error", f"the hub's answer is invalid for {what}", "no commit id in it")
            files = tuple(_file(item) for item in info.siblings or () if _is_wanted(item.rfilename))
            named = (tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:"))
            return RepoListing(repo, info.sha, files, bool(info.gated), quantization, next(named, ""))

    def search(self, text: str, limit: int) -> list[Any]:
        """Search models with safetensors weights, most downloaded first, as the hub's client returns them."""
        self.require_online()
        with asking(self.web, "the search"):
            found = self._api().list_models(
                search=text,
                filter="safetensors",
                sort="downloads",
                limit=limit,
                expand=["downloads", "safetensors", "gated", "config"],
            )
            return list(found)

    def url(self, repo: str, commit: str, file: str) -> str:
        return f"{self.web.endpoint}/{repo}/resolve/{quote(commit, safe='')}/{quote(file)}"

    def read_json(self, listing: RepoListing, name: str, limit: int) -> dict[str, Any] | None:
        """Read a small JSON file of the repository, None if it has none."""
        if listing.file(name) is None:
            return None
        what = f"{name} of {listing.repo}"
        data = self.web.read(self.url(listing.repo, listing.commit, name), listing.repo, limit)
        try:
            value = parse_json(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise HubError("unsupported_model", f"{what} is broken", "it does not contain a JSON object")
        return value

    def needed_files(self, listing: RepoListing) -> list[RepoFile]:
        """Return the weight files and the files needed to load them; nothing else of the repository."""
        if listing.quantization is not None:
            return gguf_files(listing)
        return choose_files(listing, self.read_json(listing, INDEX, INDEX_LIMIT))

    def _api(self) -> "HfApi":
        # It logs its retries itself; `asking` reports their result.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        headers = {"user-agent": USER_AGENT}  # the default user agent names the Python of this box
        api: HfApi = import_client().HfApi(
            endpoint=self.web.endpoint, token=self.web.token or False, headers=headers
        )
        return api


def choose_files(listing: RepoListing, index: dict[str, Any] | None) -> list[RepoFile]:
    """Choose the weight files: the single file if there is one, else the shards of the index, as the engine
    reads them.
    """
    if listing.file("config.json") is None:
        if any(file.name.endswith(".gguf") for file in listing.files):
            raise no_weights(listing)
        raise HubError("no_weights", f"{listing.repo} is not a model", "it has no config.json")
    if listing.file(SINGLE) is not None:
        weights = [SINGLE]
    elif index is not None:
        weights = [INDEX, *shard_names(listing.repo, index)]
    elif listing.file(MEDUSA) is not None:
        weights = [MEDUSA]
    else:
        raise no_weights(listing)
    missing = [name for name in weights if listing.file(name) is None]
    if missing:
        raise HubError("no_weights", f"{listing.repo} is incomplete on the hub", f"it lacks {missing[0]}")
    wanted = [*weights, *SMALL_FILES]
    return [file for name in wanted if (file := listing.file(name)) is not None]


def gguf_files(listing: RepoListing) -> list[RepoFile]:
    """Choose the GGUF files of the wanted quantization, the first part first, and the projector file of the
    model last. Raises HubError.
    """
    assert listing.quantization is not None
    by_name = {file.name: file for file in listing.files}
    try:
        names = choose_quantization(listing.repo, by_name, listing.quantization)
    except CliError as error:
        raise HubError("no_weights", error.what, error.why, error.fix) from None
    projector, _ = choose_projector(names[0], [name for name in by_name if is_projector(name)])
    return [by_name[name] for name in (*names, *([projector] if projector else ()))]


def shard_names(repo: str, index: dict[str, Any]) -> list[str]:
    weight_map = index.get("weight_map")
    names = list(dict.fromkeys(weight_map.values())) if isinstance(weight_map, dict) else []
    for name in names:
        if not isinstance(name, str) or not _FILE.fullmatch(name) or not name.endswith(".safetensors"):
            raise HubError(
                "unsupported_model", f"{INDEX} of {repo} is broken", f"it names {str(name)[:100]!r}"
            )
    if not names:
        raise HubError("unsupported_model", f"{INDEX} of {repo} is broken", "it has no weight_map")
    return names


def no_weights(listing: RepoListing) -> HubError:
    names: Sequence[str] = [file.name for file in listing.files]
    kinds = {".gguf": "GGUF", ".bin": "pickle", ".pt": "pickle", ".pth": "pickle", ".onnx": "ONNX"}
    other = next((kind for end, kind in kinds.items() if any(name.endswith(end) for name in names)), None)
    why = "it has no model.safetensors" + (f"; its {other} files are not served" if other else "")
    fix = "look for a safetensors version: llmbox search TEXT"
    if other == "GGUF":
        found = list(quantizations(names))
        why = f"it has GGUF files: {', '.join(found) or 'without a quantization in their names'}"
        fix = f"name one: llmbox pull {listing.repo}:{found[0]}" if found else fix
        fix += "; a GGUF file that is on this disk is served by its path: llmbox up FILE.gguf"
    return HubError("no_weights", f"{listing.repo} has no weights that can be served", why, fix)


@contextlib.contextmanager
def asking(web: HubHttpClient, what: str) -> Iterator[None]:
    """Convert errors of the hub's client to ours."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        raise _translated(error, web, what) from error


def _translated(error: Exception, web: HubHttpClient, what: str) -> HubError:
    theirs = import_client().errors
    if isinstance(error, theirs.GatedRepoError):
        return errors.gated(what, web.token)
    if isinstance(error, theirs.OfflineModeIsEnabled):
        return errors.offline()
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, theirs.RepositoryNotFoundError | theirs.RevisionNotFoundError):
        return errors.not_found(what, web.token)
    if isinstance(status, int):
        headers = getattr(response, "headers", {})
        return errors.of_status(status, headers, what, web.token)
    if isinstance(error, theirs.HFValidationError):
        return HubError(
            "repo_not_found", f"{what} is not a name on the hub", str(error), "llmbox search TEXT"
        )
    if isinstance(error, ValueError | KeyError | TypeError):
        return HubError(
            "hub_error", f"the hub's answer is invalid for {what}", type(error).__name__, retry=True
        )
    return errors.unreachable(web.endpoint, error)  # an error of the HTTP library that the hub's client uses


def _is_wanted(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    if folder and file.endswith(".gguf"):  # repositories with a folder for each quantization
        return _FILE.fullmatch(folder) is not None and _FILE.fullmatch(file) is not None
    return _FILE.fullmatch(name) is not None or name in SMALL_FILES


def _file(item: Any) -> RepoFile:
    """Convert one entry of the hub's listing."""
    etag = item.lfs.sha256 if item.lfs is not None else item.blob_id
    if not isinstance(etag, str) or not _ETAG.fullmatch(etag) or not isinstance(item.size, int):
        raise HubError("hub_error", "the hub's listing is broken", f"{item.rfilename} has no size or hash")
    return RepoFile(item.rfilename, item.size, etag)
