"""Offline inference: `LLM` runs a model inside a Python program, without a daemon, a port or a key.

    from llmbox import LLM

    with LLM("qwen3:0.6b", quant="int8") as llm:
        for output in llm.generate(["The capital of France is"], max_tokens=16):
            print(output.outputs[0].text)

Requests pass through the same routes as those of the API, in process, so that they have the same options,
defaults, checks and tokens. The engine is a separate process, as under the daemon.
"""

import asyncio
import json
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from llmbox.engine.errors import EngineError

from .config.entries import Scalar
from .config.loader import OVERRIDES, check_value, unknown_key
from .config.model_settings import MemorySettings
from .config.paths import find_paths
from .config.settings import Settings, schema
from .daemon.compose import compose, real_parts
from .errors import ApiError, CliError
from .http.app import DIALECTS, create_app
from .http.in_process import call_route
from .models.catalog import ModelRef, resolve
from .models.load_request import ModelRequest, with_draft_path
from .models.registry import Registry
from .services import Services

T = TypeVar("T")
Prompt = str | Sequence[int]
"""Text or token ids."""
Messages = Sequence[Mapping[str, Any]]

REQUESTS_AT_ONCE: Final = 256
"""Requests that wait in the engine or run; more wait here, so that no queue is full."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """`stop`, `length`, `tool_calls` or another of the API's."""
    logprobs: Any = None
    """Log-probabilities in the API's form, where the request asked for some."""
    message: dict[str, Any] | None = None
    """Message of a chat, with its reasoning and tool calls."""


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """Answers to one prompt or conversation."""

    prompt: Prompt | Messages
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: dict[str, Any]
    """Token counts, with those of the prefix cache."""


class LLMError(Exception):
    """Failed load or request. `status` and `code` are those of the API; 0 and empty before a load is done."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class LLMWarning(UserWarning):
    """Field of a request that nothing knows or that was cut, in the API's words."""


class LLM:
    """A model in memory, for programs that need no server. Methods may be called from any thread."""

    def __init__(self, model: str = "builtin", **options: Scalar) -> None:
        """Load a model that is on this disk: a name as `llmbox ls` shows it, a short name or a directory.

        `options` are the settings of a model (`llmbox config` lists them): `quant`, `ctx`, `kv_dtype`,
        `draft`, `threads` and others. config.toml is not read. Raises LLMError if it cannot be loaded.
        """
        self._end: weakref.finalize[..., Any]
        self._folder = tempfile.TemporaryDirectory(prefix="llmbox-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llmbox", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop_loop, self._loop, self._thread, self._folder)
        try:
            request = _load_request(model, options)
            self.model = request.served_name
            self._services, self._app = self._run(_start(Path(self._folder.name), request))
        except (ApiError, CliError, EngineError) as error:
            self.close()
            raise LLMError(f"cannot load {model}: {_cause(error)}") from None
        except BaseException:
            self.close()
            raise
        self._end.detach()
        ending = partial(_close_services, self._services, self._loop, self._thread, self._folder)
        self._end = weakref.finalize(self, ending)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> list[GenerationOutput]:
        """Complete prompts, in one batch; return their outputs in the same order.

        `sampling_params` and keywords are the fields of `POST /v1/completions`: `max_tokens`, `temperature`,
        `n`, `stop`, `seed` and all others but `stream`. Raises LLMError; then no prompt has an answer.
        """
        texts = _as_prompts(prompts)
        bodies = [_completion_body(prompt, sampling_params, more) for prompt in texts]
        answers = self._run(self._post_all("/v1/completions", bodies))
        return [_completed(prompt, answer) for prompt, answer in zip(texts, answers, strict=True)]

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling_params: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> list[GenerationOutput]:
        """Answer conversations, each a list of messages; return their outputs in the same order.

        `sampling_params` and keywords are the fields of `POST /v1/chat/completions`: `tools`,
        `response_format`, `reasoning_effort` and all others but `stream`. Raises LLMError.
        """
        several = _as_conversations(conversations)
        bodies = [
            {**_fields(sampling_params, more), "messages": list(messages), "return_token_ids": True}
            for messages in several
        ]
        answers = self._run(self._post_all("/v1/chat/completions", bodies))
        return [_chatted(messages, answer) for messages, answer in zip(several, answers, strict=True)]

    def embed(self, texts: Prompt | Sequence[Prompt], **more: Any) -> list[list[float]]:
        """Return the vector of each text. Keywords are the fields of `POST /v1/embeddings`. Raises
        LLMError.
        """
        bodies = [{**more, "input": _plain(text)} for text in _as_prompts(texts)]
        answers = self._run(self._post_all("/v1/embeddings", bodies))
        return [answer["data"][0]["embedding"] for answer in answers]

    def close(self) -> None:
        """Unload the model and end its engine. Does nothing the second time."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _post_all(self, path: str, bodies: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Send all requests; the first that fails ends the others."""
        room = asyncio.Semaphore(REQUESTS_AT_ONCE)

        async def post(body: Mapping[str, Any]) -> dict[str, Any]:
            async with room:
                return await self._post(path, body)

        tasks = [asyncio.create_task(post(body)) for body in bodies]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            data = json.dumps({**body, "model": self.model}).encode()
        except (TypeError, ValueError) as error:
            raise LLMError(f"a field is not JSON: {error}", 400, "invalid_request") from None
        caller = self._services.security.background_identity("")
        assert caller is not None
        answer = await call_route(self._app, "POST", path, data, caller, client=("offline", 0))
        value: dict[str, Any] = json.loads(answer.body)
        if answer.status != 200:
            problem = value.get("error", {})
            raise LLMError(problem.get("message", ""), answer.status, problem.get("code") or "")
        for each in value.get("warnings") or ():
            warnings.warn(each, LLMWarning, stacklevel=2)
        return value

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._thread.is_alive():
            work.close()
            raise LLMError("this LLM is closed", 0, "closed")
        result = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return result.result()
        except BaseException:
            result.cancel()
            raise


def _cause(error: ApiError | CliError | EngineError) -> str:
    """Return what failed, with the reason and the next step where the error has them."""
    if not isinstance(error, CliError):
        return str(error)
    parts = (error.what, f": {error.why}" if error.why else "", f". Try: {error.fix}" if error.fix else "")
    return "".join(parts)


def _load_request(model: str, options: Mapping[str, Scalar]) -> ModelRequest:
    """Check the options and find the model. Raises CliError."""
    values: dict[str, Scalar] = {}
    for name, value in options.items():
        row = schema().get(f"model.{name}")
        if row is None or row.name == OVERRIDES:
            raise unknown_key(f"model.{name}", "options")
        values[row.name] = check_value(row, value, f"options.{name}")

    names = Registry(find_paths().registry_file).read_or_nothing()

    def find(text: str) -> ModelRef:
        return resolve(text, os.environ, names)

    return ModelRequest(find(model), None, with_draft_path(values, find))


async def _start(folder: Path, request: ModelRequest) -> tuple[Services, Any]:
    """Compose the services of a daemon without sockets, and load the model."""
    settings = Settings(memory=replace(MemorySettings(), spare_engine=False))
    paths = replace(find_paths(), data_dir=folder, state_dir=folder, runtime_dir=folder)
    services = compose(settings, paths, real_parts())
    services.request_log.discard_all()
    try:
        await services.engines.load(request.config(settings.model))
    except BaseException:
        await _close(services)
        raise
    return services, create_app(services, DIALECTS)


async def _close(services: Services) -> None:
    await services.background.close()
    await services.engines.close()
    await services.gateway.close()
    services.events.close()
    services.security.close()
    services.request_log.close()


def _close_services(
    services: Services,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    closing: Future[None] = asyncio.run_coroutine_threadsafe(_close(services), loop)
    try:
        closing.result(timeout=30)
    finally:
        _stop_loop(loop, thread, folder)


def _stop_loop(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)
    if not thread.is_alive():
        loop.close()
    folder.cleanup()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if all(isinstance(each, int) for each in prompts) and prompts:
        return [[int(each) for each in prompts if isinstance(each, int)]]
    return [each for each in prompts if not isinstance(each, int)]


def _as_conversations(conversations: Messages | Sequence[Messages]) -> list[Messages]:
    if conversations and isinstance(conversations[0], Mapping):
        return [[each for each in conversations if isinstance(each, Mapping)]]
    return [each for each in conversations if not isinstance(each, Mapping)]


def _plain(prompt: Prompt) -> Prompt:
    return prompt if isinstance(prompt, str) else list(prompt)


def _fields(params: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    return {**(params or {}), **more, "stream": False}


def _completion_body(
    prompt: Prompt, params: Mapping[str, Any] | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    return {**_fields(params, more), "prompt": _plain(prompt), "return_token_ids": True}


def _completed(prompt: Prompt, answer: Mapping[str, Any]) -> GenerationOutput:
    choices = answer["choices"]
    outputs = [
        CompletionOutput(
            each["index"],
            each["text"],
            each.get("token_ids") or [],
            each["finish_reason"],
            each.get("logprobs"),
        )
        for each in choices
    ]
    return GenerationOutput(prompt, choices[0].get("prompt_token_ids") or [], outputs, answer["usage"])


def _chatted(messages: Messages, answer: Mapping[str, Any]) -> GenerationOutput:
    outputs = [
        CompletionOutput(
            each["index"],
            each["message"].get("content") or "",
            each.get("token_ids") or [],
            each["finish_reason"],
            each.get("logprobs"),
            each["message"],
        )
        for each in answer["choices"]
    ]
    return GenerationOutput(messages, answer.get("prompt_token_ids") or [], outputs, answer["usage"])
