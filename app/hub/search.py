"""Hub search: each result comes with whether the model would run here."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from llmbox.engine.model_config.config import ModelConfig
from llmbox.engine.planning.estimator import MemoryPlan

from ..models.catalog import HUB_ID
from .errors import HubError
from .model_info import remote_config
from .repo_files import Hub, Listing, RepoFile

AT_ONCE = 8

Planner = Callable[[ModelConfig], tuple[MemoryPlan | None, str]]


@dataclass(frozen=True, slots=True)
class Hit:
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


def search(hub: Hub, text: str, limit: int, planner: Planner) -> list[Hit]:
    """Search the hub. One small file is read for each result, side by side. Raises HubError."""
    found = [item for item in hub.search(text, limit) if HUB_ID.fullmatch(str(item.id))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda item: _hit(hub, item, planner), found))


def _hit(hub: Hub, item: Any, planner: Planner) -> Hit:
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
    return Hit(item.id, item.downloads or 0, params, bool(item.gated), fits, context, memory, detail)


def _config_only(repo: str) -> Listing:
    """Build a listing as if the repository held only the config: the rest is looked up when it is pulled."""
    return Listing(repo, "main", (RepoFile("config.json", 0, ""),), gated=False)
