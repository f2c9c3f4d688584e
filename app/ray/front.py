"""Ingress of the deployment: the daemon's HTTP API, with replicas where the daemon has engine processes."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.spawn import Launch

from ..config.model_settings import MemorySettings
from ..config.paths import find_paths
from ..config.settings import Settings
from ..daemon.compose import DaemonParts, compose
from ..engines.engine_process import SupervisorOptions
from ..engines.supervisor import Supervisor
from ..errors import ApiError
from ..http.app import DIALECTS, create_app
from ..text.tokenizer.tokenizer import load_model_text
from . import scaling
from .remote_supervisor import RemoteSupervisor


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
