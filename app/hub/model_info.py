"""Model facts before a load, from the disk or from the hub, and search on the hub."""

import io
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from llmbox.engine.checkpoint.formats.floats import split_experts
from llmbox.engine.checkpoint.formats.weight_format import GgufFormat, check_tensors
from llmbox.engine.checkpoint.index import list_tensors
from llmbox.engine.checkpoint.names import full_names
from llmbox.engine.checkpoint.quantized_layout import MODELOPT_FILE
from llmbox.engine.checkpoint.safetensors import TensorEntry, entries_of, load_json
from llmbox.engine.errors import EngineError, ModelError
from llmbox.engine.gguf.folder import config_json, gguf_of, vector_files
from llmbox.engine.gguf.matrices import check_matrices
from llmbox.engine.gguf.names import parts_of_model
from llmbox.engine.gguf.projector import check_projector
from llmbox.engine.gguf.reader import MAX_HEADER, GgufFile, read_gguf, read_header
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.engine.model_config.expected_tensors import check_weights
from llmbox.engine.planning.estimator import MemoryPlan

from ..errors import CliError, Exit
from ..models.catalog import HUB_ID, ModelRef, hub_cache, resolve
from ..models.gguf_folders import is_projector
from ..models.registry import HubFacts, NameLookup, full_name, recommended
from .errors import HubError
from .repo_files import CONFIG_LIMIT, Hub, RepoFile, RepoListing, choose_files

HEADER_GUESS = 64 * 1024
"""Bytes of a weights file asked for at first; most headers are shorter."""
GGUF_HEADER_GUESS = 4 << 20
"""Bytes of a GGUF file asked for at first: vocabularies are in its header."""
AT_ONCE = 8
_TIED = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    name: str
    config: ModelConfig
    stored_bytes: int
    """Bytes of the weights in the files."""
    stored_params: int
    """Counted from the headers; a copy of a tied matrix, MTP layers and adapters are not counted."""
    missing_bytes: int
    """Bytes of the files that serving needs and that are not on this disk."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Disagreements between config and weights."""
        wanted = self.config.num_parameters
        if self.config.stored is None and abs(self.stored_params - wanted) > 0.01 * wanted:
            return (
                f"config.json describes {wanted:,} parameters, the weight files hold {self.stored_params:,}",
            )
        return ()


def local_facts(ref: ModelRef) -> ModelFacts:
    """Read a model's facts from the disk. Raises ModelError."""
    config = parse_config(ref.path)
    file = gguf_of(ref.path)
    if file is not None:
        gguf = read_gguf(file)
        check_matrices(gguf)
        tensors = parts_of_model(gguf.tensors)
    else:
        tensors = list_tensors(ref.path)
    facts = _facts(ref.name, config, tensors.values(), 0)
    if file is None:
        check_weights(str(ref.path), config, tensors)
    return facts


def remote_facts(hub: Hub, repo: str, revision: str | None, quantization: str | None = None) -> ModelFacts:
    """Read config.json and the headers of the weight files by range. Raises HubError."""
    listing = hub.list_files(repo, revision, quantization)
    files = hub.needed_files(listing)
    if quantization is not None:
        name = f"{repo}:{quantization}" + ("" if revision is None else f"@{revision}")
        return _gguf_facts(hub, listing, files, name)
    config = remote_config(hub, listing)
    weights = [file for file in files if file.name.endswith(".safetensors")]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda file: remote_header(hub, listing, file), weights))
    size = sum(file.size for file in files)
    tensors = full_names({tensor.name: tensor for header in found for tensor in header})
    name = repo if revision is None else f"{repo}@{revision}"
    try:
        facts = _facts(name, config, tensors.values(), size)
        check_weights(name, config, tensors)
    except ModelError as error:
        raise HubError("unsupported_model", f"{name} cannot be served", str(error)) from None
    return facts


def remote_config(hub: Hub, listing: RepoListing) -> ModelConfig:
    """Read the config of a model on the hub. Raises HubError `unsupported_model` for one that the engine
    would refuse.
    """
    if listing.quantization is not None:
        files = hub.needed_files(listing)
        return _gguf_config(hub, listing, remote_gguf(hub, listing, files[0]), files)
    choose_config(listing)
    names = [name for name in ("config.json", MODELOPT_FILE) if listing.file(name) is not None]
    found = {name: hub.read_json(listing, name, CONFIG_LIMIT) for name in names}
    try:
        return parse_config_files(found)
    except EngineError as error:
        raise HubError(
            "unsupported_model",
            f"{listing.repo} cannot be served",
            str(error),
            "search for another model: llmbox search TEXT",
        ) from None


def remote_gguf(hub: Hub, listing: RepoListing, file: RepoFile) -> GgufFile:
    """Read the header of a GGUF file by range: more of it until it is whole. Raises HubError."""
    url, head = hub.url(listing.repo, listing.commit, file.name), b""
    while True:
        end = min(file.size, max(GGUF_HEADER_GUESS, 4 * len(head)))
        head += hub.web.read(url, listing.repo, end - len(head), start=len(head), end=end)
        try:
            return read_header(Path(file.name), head, file.size)
        except ModelError as error:
            if end < file.size and end < MAX_HEADER and "cut short" in str(error):
                continue
            raise HubError("unsupported_model", f"{listing.repo} cannot be served", str(error)) from None


def _gguf_config(hub: Hub, listing: RepoListing, gguf: GgufFile, files: Sequence[RepoFile]) -> ModelConfig:
    projector = next((file for file in files if is_projector(file.name)), None)
    try:
        if projector is None:
            return parse_config_files(config_json(gguf))
        try:
            vision = check_projector(remote_gguf(hub, listing, projector))
            return parse_config_files(config_json(gguf, projector=vision))
        except (EngineError, HubError) as error:
            if isinstance(error, HubError) and error.code != "unsupported_model":
                raise
            why = error.why if isinstance(error, HubError) else error
            return parse_config_files(config_json(gguf, problem=f"its projector file is not read: {why}"))
    except EngineError as error:
        raise HubError("unsupported_model", f"{listing.repo} cannot be served", str(error)) from None


def _gguf_facts(hub: Hub, listing: RepoListing, files: list[RepoFile], name: str) -> ModelFacts:
    first, *others = [remote_gguf(hub, listing, file) for file in files if not is_projector(file.name)]
    tensors = dict(first.tensors)
    for other in others:
        tensors |= other.tensors
    whole = replace(first, tensors=tensors)
    config, size = _gguf_config(hub, listing, whole, files), sum(file.size for file in files)
    try:
        check_matrices(whole)
        vector_files(whole)
    except ModelError as error:
        raise HubError("unsupported_model", f"{name} cannot be served", str(error)) from None
    return _facts(name, config, parts_of_model(tensors).values(), size)


def parse_config_files(files: Mapping[str, object]) -> ModelConfig:
    """Parse config.json and its companions, given as JSON values by file name. Raises EngineError."""
    with tempfile.TemporaryDirectory(prefix="llmbox-") as folder:
        for name, raw in files.items():
            (Path(folder) / name).write_text(json.dumps(raw))
        try:
            return parse_config(Path(folder))
        except EngineError as error:
            raise type(error)(str(error).replace(f"{folder}/", "")) from None


def choose_config(listing: RepoListing) -> None:
    if listing.file("config.json") is None:
        choose_files(listing, None)  # raises, naming the missing file


def remote_header(hub: Hub, listing: RepoListing, file: RepoFile) -> list[TensorEntry]:
    url = hub.url(listing.repo, listing.commit, file.name)

    def piece(start: int, end: int) -> bytes:
        return hub.web.read(url, listing.repo, end - start, start=start, end=min(end, file.size))

    head = piece(0, HEADER_GUESS)
    length = int.from_bytes(head[:8], "little")
    try:
        if len(head) < 8 + length <= file.size and length <= 100_000_000:
            head += piece(len(head), 8 + length)
        path = Path(file.name)
        raw, start = load_json(path, io.BytesIO(head), file.size)
        raw.pop("__metadata__", None)
        tensors = entries_of(path, raw, start, file.size)
    except EngineError as error:
        raise HubError("unsupported_model", f"{listing.repo} cannot be served", str(error)) from None
    return tensors


def _facts(name: str, config: ModelConfig, tensors: Iterable[TensorEntry], missing: int) -> ModelFacts:
    """Build the facts of a model. Raises ModelError."""
    entries = list(tensors)
    if config.stored is not None and not isinstance(config.stored, GgufFormat):
        check_tensors(config.stored, split_experts(config.stored, {each.name: each for each in entries}))
    extra = range(config.num_layers, config.num_layers + config.extra_layers)
    layers_of_drafts = ("mtp.", *(f"{at}.{layer}." for layer in extra for at in ("model.layers", "blk")))
    has_tasks = config.encoder is not None and bool(config.encoder.tasks)
    counted = [
        e
        for e in entries
        if not (config.tie_word_embeddings and e.name.endswith(_TIED))
        and not e.name.startswith(layers_of_drafts)
        and (has_tasks or not e.name.endswith((".lora_A", ".lora_B")))
    ]
    return ModelFacts(
        name,
        config,
        sum(e.nbytes for e in entries),
        sum(prod(e.shape) for e in counted),
        missing,
    )


def find_facts(
    model: str, environ: Mapping[str, str], names: NameLookup, memory: Mapping[str, ModelRef] | None = None
) -> tuple[ModelFacts, ModelRef]:
    """Read a model's facts from this disk if it is there, else from the hub. Raises CliError."""
    try:
        ref = resolve(model, environ, names, memory)
        return local_facts(ref), ref
    except CliError as error:
        model = full_name(model)
        match = HUB_ID.fullmatch(model)
        if error.exit != Exit.NOT_FOUND or match is None:
            raise
    except EngineError as error:
        raise CliError(
            f"{model} cannot be served", str(error), "llmbox search TEXT", Exit.DOES_NOT_FIT
        ) from error
    try:
        facts = remote_facts(Hub.of_environment(), match["repo"], match["revision"], match["quantization"])
    except HubError as error:
        raise CliError(error.what, error.why, error.fix, error.exit) from error
    return facts, ModelRef(model, hub_cache(environ), "hub")


Planner = Callable[[ModelConfig], tuple[MemoryPlan | None, str]]


@dataclass(frozen=True, slots=True)
class SearchResult:
    name: str
    downloads: int
    params: int | None
    gated: bool
    fits: Literal["yes", "no", "unsupported", "unknown"]
    context: int | None
    """Context length that the model would be served with."""
    memory: int | None
    """Bytes that it would take."""
    detail: str
    """Reason why it would not run."""


def search(hub: Hub, text: str, limit: int, planner: Planner) -> list[SearchResult]:
    """Search the hub. One small file is read for each result, side by side. Raises HubError."""
    found = [item for item in hub.search(text, limit) if HUB_ID.fullmatch(str(item.id))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda item: _hit(hub, item, planner), found))


def _hit(hub: Hub, item: Any, planner: Planner) -> SearchResult:
    fits: Literal["yes", "no", "unsupported", "unknown"] = "unknown"
    params = getattr(item.safetensors, "total", None) if item.safetensors is not None else None
    context = memory = None
    try:
        config = remote_config(hub, _config_only(item.id))
        params = config.num_parameters
        plan, detail = planner(config)
        fits = "yes" if plan else "no"
        if plan is not None:
            context, memory = plan.context, plan.total_bytes
    except HubError as error:
        detail = error.why or error.what
        if error.code in {"unsupported_model", "no_weights"}:
            fits = "unsupported"
    return SearchResult(
        name=item.id,
        downloads=item.downloads or 0,
        params=params,
        gated=bool(item.gated),
        fits=fits,
        context=context,
        memory=memory,
        detail=detail,
    )


def ask_recommended(hub: Hub) -> tuple[dict[str, HubFacts], dict[str, HubError]]:
    """Ask the hub for the size, license and config of every recommended model; no weights are read.

    Returns the facts and the failures, by repository. Raises HubError where the hub described none.
    """
    hub.require_online()

    def ask(repo: str) -> HubFacts | HubError:
        try:
            listing = hub.list_files(repo, None)
            config = remote_config(hub, listing)
            return HubFacts(
                license=listing.license,
                gated=listing.gated,
                params=config.num_parameters,
                files=sum(file.size for file in hub.needed_files(listing)),
                config=hub.read_json(listing, "config.json", CONFIG_LIMIT) or {},
            )
        except HubError as error:
            return error

    repos = [model.repo for model in recommended()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(repos, pool.map(ask, repos), strict=True))
    found = {repo: each for repo, each in answers.items() if isinstance(each, HubFacts)}
    failed = {repo: each for repo, each in answers.items() if isinstance(each, HubError)}
    if not found and failed:
        raise next(iter(failed.values()))
    return found, failed


def _config_only(repo: str) -> RepoListing:
    """Build a listing as if the repository held only the config: the rest is looked up when it is pulled."""
    return RepoListing(repo, "main", (RepoFile("config.json", 0, ""),), gated=False)
