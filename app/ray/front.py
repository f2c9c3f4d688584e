"""Ingress of the deployment: the daemon's HTTP API, with replicas where the daemon has engine processes.

To the gateway `RemoteSupervisor` is a supervisor like any other. Requests go to replicas instead of a
process; those of a replica that died are sent to another one with their tokens so far, as after the death
of an engine.
"""

import asyncio
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import (
    AbortRequest,
    AddRequest,
    KeepImages,
    ModelInfo,
    Ping,
    Pong,
    PreparedImage,
    RequestOutput,
)
from llmbox.engine.ipc.profile_messages import BlockMap, StepProfile
from llmbox.engine.ipc.spawn import Launch

from ..config.model_settings import MemorySettings
from ..config.paths import find_paths
from ..config.settings import Settings
from ..daemon.compose import DaemonParts, compose
from ..engines.engine_process import SupervisorOptions
from ..engines.prefix_table import block_hashes
from ..engines.supervisor import Supervisor
from ..errors import ApiError
from ..http.app import DIALECTS, create_app
from ..text.tokenizer.text_loader import load_model_text
from . import scaling
from .replica import NEEDS_VOCABULARY, ReplicaFacts

log = logging.getLogger("llmbox.ray")

MOST_RESUMES: Final = 5
"""Number of replicas that may die with a request before it is given up as the cause."""
_PAUSE: Final = 0.2
"""Seconds before a request is sent again: its replica may be known as dead by then."""
RETRY_AFTER: Final = 10
"""Seconds after which Serve usually has a new replica."""


class RemoteSupervisor(Supervisor):
    """Supervisor whose engine is a deployment. `running` returns the fingerprints of running replicas."""

    def __init__(
        self,
        config: EngineConfig,
        options: SupervisorOptions | None = None,
        *,
        handle: Any,
        running: Callable[[], Mapping[str, str]],
    ) -> None:
        super().__init__(config, options)
        self._handle = handle
        self._running = running
        self._fingerprint = ""
        self._replica_info: ModelInfo | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._images: dict[bytes, PreparedImage] = {}

    async def start(self) -> None:
        """Ask a replica for its facts; wait until there is one."""
        self._launched.set()
        facts = msgspec.msgpack.decode(await self._handle.facts.remote(), type=ReplicaFacts)
        self._fingerprint = facts.fingerprint
        self._replica_info = facts.info
        self._became_ready(facts.info)

    async def stop(self, code: str = "model_unloaded", message: str = "The model was unloaded.") -> None:
        self._requests.fail_all(code, message)
        self._change("stopped", message)
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def check_room(self, requests: int, tenant: str = "") -> None:
        """Raise as an engine's does, and ApiError 503 while no replica of this model runs."""
        fitting = self._fitting()
        if self.state == "ready" and not fitting:
            raise self._nobody()
        if self._replica_info is not None:
            most = self._replica_info.max_running * max(1, fitting)
            self.info = replace(self._replica_info, max_running=most)
        super().check_room(requests, tenant)

    def readiness(self) -> tuple[bool, str]:
        if self.state == "ready" and not self._fitting():
            return False, self._nobody().message
        return super().readiness()

    async def block_map(self) -> BlockMap | None:
        return None  # each replica has its own

    async def profile_steps(self, *, is_on: bool) -> StepProfile | None:
        del is_on
        return None

    def _fitting(self) -> int:
        return sum(each == self._fingerprint for each in self._running().values())

    def _nobody(self) -> ApiError:
        others = set(self._running().values())
        message = f"No replica of {self.name} runs. Serve starts another one; try again later."
        if others:
            message = (
                f"The replicas of {self.name} run another model or version ({', '.join(sorted(others))}) "
                f"than this front ({self._fingerprint}). Deploy it again: llmbox ray deploy."
            )
        headers = {"Retry-After": str(RETRY_AFTER)}
        return ApiError(503, message, code="no_replica", type="server_error", headers=headers)

    # ------------------------------------------------------------------ messages

    def _send(self, message: Any) -> None:
        match message:
            case AddRequest():
                task = asyncio.create_task(self._stream(message), name=f"ray {message.request_id}")
                self._tasks[message.request_id] = task
            case AbortRequest(request_id=name):
                if (running := self._tasks.get(name)) is not None:
                    running.cancel()
                # An engine answers an abort, after which nothing of the request is kept.
                ended = RequestOutput(request_id=name, finish_reason="abort")
                asyncio.get_running_loop().call_soon(self._requests.deliver, ended)
            case KeepImages():
                self._images |= {each.content_hash: each for each in message.images}
                for digest in message.drop:
                    self._images.pop(digest, None)
            case Ping():
                self._receive(
                    Pong(nonce=message.nonce, stats=self.stats)
                )  # Serve asks replicas for their health

    async def _stream(self, request: AddRequest) -> None:
        try:
            pixels = [replace(each, pixels=self._images[each.content_hash].pixels) for each in request.images]
            if await self._relay(replace(request, images=pixels, fork_of=None)):
                return
            cause = "its stream ended early"
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever Ray raises: the replica is gone or cut off
            cause = f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            if self._tasks.get(request.request_id) is asyncio.current_task():
                del self._tasks[request.request_id]
        log.warning("request %s lost its replica: %s", request.request_id, cause)
        await self._resume(request.request_id)

    async def _relay(self, request: AddRequest) -> bool:
        """Pass on the outputs of a replica. Returns whether the last one came."""
        assert self._replica_info is not None
        hashes = block_hashes(request, self._replica_info.block_size)
        call = self._handle.options(stream=True).generate
        outputs = call.remote(msgspec.msgpack.encode(request), hashes, self._fingerprint)
        try:
            async for data in outputs:
                output = msgspec.msgpack.decode(data, type=RequestOutput)
                if output.error_code == NEEDS_VOCABULARY:
                    await self._send_vocabulary()
                    return await self._relay(request)
                self._requests.deliver(output)
                if output.finish_reason is not None:
                    return True
        finally:
            outputs.cancel()
        return False

    async def _send_vocabulary(self) -> None:
        assert self.vocabulary is not None
        own = self.vocabulary
        await self._handle.broadcast("set_vocabulary", own.data, own.sizes, own.special).results_async()

    async def _resume(self, request_id: str) -> None:
        """Send a request again, with its tokens so far. One under which replicas keep dying is given up."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request_id] = task  # an abort may come meanwhile
        try:
            await asyncio.sleep(_PAUSE)
        finally:
            if self._tasks.get(request_id) is task:
                del self._tasks[request_id]
        self._requests.resend(request_id, most=MOST_RESUMES)


class Front:
    """Front of one model. Keys are those of the data directory; requests are not logged."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, engines: Any, config: EngineConfig, settings: Settings, keys_file: Path, alias: str | None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="llmbox-ray-")
        folder = Path(self._folder.name)
        paths = replace(find_paths(), data_dir=folder, state_dir=folder, runtime_dir=folder)
        if paths.keys_file != keys_file:
            paths.keys_file.symlink_to(keys_file)  # read again at every change, by path
        deployment = engines.deployment_id

        def supervise(config: EngineConfig, options: SupervisorOptions) -> Supervisor:
            return RemoteSupervisor(
                config, options, handle=engines, running=lambda: scaling.RUNNING.get(str(deployment), {})
            )

        settings = replace(settings, memory=replace(MemorySettings(), spare_engine=False))
        parts = DaemonParts(Launch(), load_model_text, supervise=supervise)
        self.services = compose(settings, paths, parts)
        self.services.request_log.discard_all()
        try:
            await self.services.engines.load(config, alias=alias)
        except ApiError as error:
            raise RuntimeError(f"cannot serve {config.name}: {error.message}") from None

    def __serve_build_asgi_app__(self) -> Any:
        app = create_app(self.services, DIALECTS)

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                while True:
                    kind = (await receive())["type"]
                    await send({"type": f"{kind}.complete"})
                    if kind == "lifespan.shutdown":
                        return
            await app(scope, receive, send)

        return serve

    async def resumed(self) -> int:
        """Number of requests that were sent again to another replica."""
        return sum(model.supervisor.resumed for model in self.services.engines.models())
