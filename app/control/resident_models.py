"""Models that hold memory, or have it reserved while they load, and the refusal where it is short."""

from collections.abc import Mapping, Sequence

from llmbox.engine.ipc.messages import ModelInfo
from llmbox.engine.planning.estimator import show_bytes

from ..engines.eviction import AllocationFailure, Place, ResidentModel
from ..engines.manager import EngineManager
from ..errors import ApiError


class ResidentModels:
    """Table of the models in memory, with reservations for those that are being loaded."""

    def __init__(self, engines: EngineManager) -> None:
        self._engines = engines
        self._reserved: dict[str, tuple[Place, Mapping[int, int]]] = {}

    def reserve(self, name: str, device: Place, takes: Mapping[int, int]) -> None:
        """Reserve bytes of each memory for a model until its load ends."""
        self._reserved[name] = device, takes

    def residents(self, device: str | None = None, *, but: str = "") -> list[ResidentModel]:
        """Return the models in memory, and those being loaded with the memory reserved for them."""
        found = []
        for model in self._engines.models():
            info, state = model.supervisor.info, model.supervisor.state
            if info is None or state == "failed" or (device is not None and info.device != device):
                continue
            found.append(
                ResidentModel(
                    model.name,
                    bytes_by_memory(info),
                    model.busy,
                    model.pinned,
                    model.idle_since,
                    model.ttl,
                    owned=not model.on_request,
                )
            )
        loading = {supervisor.name for supervisor in self._engines.loading()}
        for name in [name for name in self._reserved if name not in loading]:
            del self._reserved[name]
        found += [
            ResidentModel(name, takes, busy=True, pinned=False, idle_since=0.0)
            for name, (place, takes) in self._reserved.items()
            if name != but and device in {None, place}
        ]
        return found


def bytes_by_memory(info: ModelInfo) -> dict[int, int]:
    """Return the bytes of each memory. All ranks of a CPU model share one memory, a GPU holds one rank."""
    total = info.weights_bytes + info.kv_bytes + info.workspace_bytes
    places = info.gpus if info.device == "cuda" and info.gpus else (0,)
    return dict.fromkeys(places, total // len(places))


def no_room(name: str, room: AllocationFailure, residents: Sequence[ResidentModel]) -> ApiError:
    """Error of a model that does not fit: 503 if models that are busy or pinned are in its way, else 400."""
    text = f"{name} needs {show_bytes(room.need, up=True)} and {show_bytes(max(0, room.have))} are available"
    if not room.blockers:
        return ApiError(400, f"{text}: the memory budget is too small for it.", "does_not_fit")
    why = {each.name: each.claim for each in residents}
    return ApiError(
        503,
        f"{text} while {', '.join(f'{blocker} is {why[blocker]}' for blocker in room.blockers)}. "
        "Try again later, or ask the owner to unload one.",
        "memory_busy",
        type="server_error",
        headers={"Retry-After": "5"},
    )
