"""A daemon's HTTP side on a loopback port, in a thread: real server, gateway and supervisor."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from llmbox.app.config.loader import LoadedSettings
from llmbox.app.config.paths import find_paths
from llmbox.app.config.settings import LimitSettings, Settings
from llmbox.app.control.controller import DaemonController
from llmbox.app.daemon.compose import DaemonParts, compose
from llmbox.app.engines import manager
from llmbox.app.http.app import DIALECTS, create_app
from llmbox.app.http.in_process import send_in_process
from llmbox.app.http.server.server import serve
from llmbox.app.http.server.sockets import listen_tcp
from llmbox.app.lifecycle.instance import RunningDaemon
from llmbox.app.services import Services
from llmbox.app.text.tokenizer.text_loader import load_model_text
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.spawn import Launch
from llmbox.engine.weights.packed_cache.cache import cache_variables
from support.cli_box import PATIENCE
from support.deferred_module import DeferredModule
from support.engines import ForkedEngines
from support.fake_engine import fake_launch, write_model
from support.tokenizers_zoo import CHATML, byte_level, drawn_ids, write_text_files

openai = DeferredModule("openai")

T = TypeVar("T")
LOADING = 400.0
"""Seconds that a model may take: a real engine's first one compiles the kernels, beside other tests."""


class Server:
    """`services` belongs to the server's loop: touch it through `call`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, services: Services, port: int) -> None:
        self._loop = loop
        self.services = services
        self.control: DaemonController | None = None
        self.url = f"http://127.0.0.1:{port}"

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LOADING)

    def load(self, directory: Path, name: str, *, alias: str | None = None, **config: Any) -> None:
        settings = EngineConfig(model_path=str(directory), name=name, **config)
        self.call(self.services.engines.load(settings, alias=alias))

    def load_scripted(self, root: Path, answers: dict[str, str], template: str, context: int = 1024) -> None:
        """A model under each name that always answers with that text; the one named `plain` has ChatML."""
        tokenizer = byte_level()
        for name, answer in answers.items():
            text = write_text_files(root / name, tokenizer, CHATML if name == "plain" else template)
            script = tokenizer.encode(answer, add_special_tokens=False).ids
            write_model(text, **drawn_ids(tokenizer), context=context, script=script)
            self.load(root / name, name)

    def client(self, **options: Any) -> "openai.OpenAI":
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, **options)

    def async_client(self, **options: Any) -> "openai.AsyncOpenAI":
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, **options)


@cache
def _packed_weights() -> "tempfile.TemporaryDirectory[str]":
    """For the engines of all servers, which come from one process."""
    return tempfile.TemporaryDirectory(prefix="llmbox-test-weights-")


@contextlib.contextmanager
def serving(
    data: Path,
    launch: Launch | None = None,
    *,
    controlled: bool = False,
    settings: Settings | None = None,
    **limits: Any,
) -> Iterator[Server]:
    """`launch`: the fake engine, unless another is given.

    `controlled`: with `DaemonController`, so that models on disk are found and memory is managed, as in a
    daemon.
    """
    launch = launch or fake_launch()
    caches = cache_variables(Path(_packed_weights().name), 1.0)
    engines = ForkedEngines(replace(launch, env=caches | launch.env))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def compose_on_loop() -> Services:
        wanted = replace(settings or Settings(), limits=replace(LimitSettings(), **limits))
        paths = find_paths(data)
        paths.create()
        with patch.object(manager, "PrewarmedProcess", lambda *_, **__: engines):
            services = compose(wanted, paths, DaemonParts(launch, load_model_text))
        services.request_log.start()
        return services

    services = asyncio.run_coroutine_threadsafe(compose_on_loop(), loop).result(PATIENCE)
    sockets = listen_tcp("127.0.0.1", 0)
    server = Server(loop, services, sockets[0].getsockname()[1])
    app = create_app(services, DIALECTS)
    if controlled:
        app.state.control = server.control = server.call(_controlled(services))
    loop.call_soon_threadsafe(services.batches.start, partial(send_in_process, app))
    done = asyncio.run_coroutine_threadsafe(
        serve(app.shell, sockets, limits=services.settings.limits, drain=services.drain, drain_timeout=1.0),
        loop,
    )
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(services.drain.begin)
        loop.call_soon_threadsafe(services.drain.begin)
        done.result(PATIENCE)
        services.security.close()
        if server.control is not None:
            server.call(server.control.close())
        server.call(services.batches.close())
        server.call(services.background.close())
        server.call(services.engines.close())
        server.call(services.gateway.close())
        services.request_log.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


async def _controlled(services: Services) -> DaemonController:
    loaded = LoadedSettings(services.settings, {})
    running = RunningDaemon(pid=0, host="127.0.0.1", port=0, socket="", started_at=0.0, version="")
    return DaemonController(services, running, loaded, lambda: loaded, {})
