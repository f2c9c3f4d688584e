"""Tools of llmbox's MCP server: calls of the API that the command line uses too."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from .features import Report, Tool, ToolApi, ToolError

LOOK_AGAIN: Final = 0.5
"""Polling interval in seconds of a load or download that a call waits for."""
_Model = Annotated[str, Meta(description="Name as in list_models, a short name, org/name or a path.")]
_Wait = Annotated[
    float,
    Meta(ge=0, le=3600, description="Seconds to wait for the end; the work goes on in the daemon after."),
]


class NoArguments(Struct, forbid_unknown_fields=True):
    pass


class ModelArgument(Struct, forbid_unknown_fields=True):
    model: _Model


class SearchArguments(Struct, forbid_unknown_fields=True):
    text: Annotated[str, Meta(min_length=1, max_length=200, description="Words of the model's name.")]
    limit: Annotated[int, Meta(ge=1, le=50)] = 10


class PullArguments(Struct, forbid_unknown_fields=True):
    model: Annotated[str, Meta(description="Short name such as qwen3:0.6b, or org/name.")]
    anyway: Annotated[
        bool, Meta(description="Download it even if it does not fit or cannot be served here.")
    ] = False
    wait_s: _Wait = 45.0


class LoadArguments(Struct, forbid_unknown_fields=True):
    model: _Model
    options: Annotated[
        dict[str, bool | int | float | str | None],
        Meta(description='Settings of this load, such as {"model.quant": "int8", "model.ctx": 8192}.'),
    ] = {}
    ttl_s: Annotated[
        float | None, Meta(description="Idle seconds after which it leaves memory; null keeps it.")
    ] = None
    wait_s: _Wait = 45.0


class UnloadArguments(Struct, forbid_unknown_fields=True):
    model: Annotated[str | None, Meta(description="Model to unload; null unloads all.")]


class RequestsArguments(Struct, forbid_unknown_fields=True):
    model: Annotated[str | None, Meta(description="Requests to this model only.")] = None
    errors: Annotated[bool, Meta(description="Failed requests only.")] = False
    limit: Annotated[int, Meta(ge=1, le=200)] = 20


class AskArguments(Struct, forbid_unknown_fields=True):
    model: _Model
    prompt: str
    system: Annotated[str, Meta(description="System prompt.")] = ""
    max_tokens: Annotated[int, Meta(ge=1, le=100_000)] = 1024


def _page(path: str) -> Callable[[ToolApi, NoArguments, Report], Awaitable[Any]]:
    async def run(api: ToolApi, _: NoArguments, __: Report) -> Any:
        return await api.get(path)

    return run


async def _list_models(api: ToolApi, _: NoArguments, __: Report) -> Any:
    return {"models": (await api.get("/v1/models"))["data"]}


async def _running(api: ToolApi, _: NoArguments, __: Report) -> Any:
    return {"models": [_brief(each) for each in (await api.get("/admin/api/models"))["models"]]}


_INFO: Final = ("device", "dtype", "quant", "context_window", "weights_bytes", "kv_bytes", "max_running")


def _brief(model: dict[str, Any]) -> dict[str, Any]:
    """Select the fields of a loaded model that matter to a user."""
    names = ("name", "aliases", "state", "cause", "ref", "chat", "pinned", "open_requests", "expires_s")
    found = {name: model.get(name) for name in names}
    info, stats = model.get("info") or {}, model.get("stats") or {}
    found |= {name: info[name] for name in _INFO if name in info}
    found |= {name: stats[name] for name in ("running", "waiting") if name in stats}
    return found | {name: model[name] for name in ("progress", "warnings", "asked") if model.get(name)}


async def _search(api: ToolApi, given: SearchArguments, _: Report) -> Any:
    return await api.get("/admin/api/search", text=given.text, limit=given.limit)


async def _fit(api: ToolApi, given: ModelArgument, _: Report) -> Any:
    found = await api.get("/admin/api/fit", model=given.model)
    names = ("fits", "fits_disk", "reason", "words", "advice")
    return {name: found[name] for name in names if name in found}


async def _pull(api: ToolApi, given: PullArguments, report: Report) -> Any:
    body = {"model": given.model, "anyway": given.anyway}
    download = (await api.post("/admin/api/downloads", body))["download"]

    async def look() -> dict[str, Any]:
        rows = (await api.get("/admin/api/downloads"))["downloads"]
        return next((each for each in rows if each["model"] == download["model"]), download)

    def describe(now: dict[str, Any]) -> tuple[float, float | None, str]:
        return now.get("done") or 0, now.get("total"), f"{now['model']}: {now['state']}"

    found = await _wait(given.wait_s, look, lambda now: now["state"] not in _PULLING, describe, report)
    found.pop("files", None)
    if found["state"] == "failed":
        error = found["error"] or {"what": "the daemon's log has the reason", "why": "", "fix": ""}
        raise ToolError(". ".join(text for text in (error["what"], error["why"], error["fix"]) if text))
    return {"download": found}


_PULLING: Final = frozenset({"checking", "downloading"})


async def _downloads(api: ToolApi, _: NoArguments, __: Report) -> Any:
    rows = (await api.get("/admin/api/downloads"))["downloads"]
    return {"downloads": [{n: v for n, v in each.items() if n != "files"} for each in rows]}


async def _load(api: ToolApi, given: LoadArguments, report: Report) -> Any:
    body = {"model": given.model, "options": given.options, "ttl": given.ttl_s}
    begun = (await api.post("/admin/api/models/load", body))["model"]

    async def look() -> dict[str, Any]:
        rows = (await api.get("/admin/api/models"))["models"]
        return next((each for each in rows if each["name"] == begun["name"]), begun)

    def describe(now: dict[str, Any]) -> tuple[float, float | None, str]:
        at = now.get("progress") or {}
        return at.get("done", 0), at.get("total") or None, now["cause"] or now["state"]

    found = await _wait(given.wait_s, look, lambda now: now["state"] != "loading", describe, report)
    if found["state"] == "failed":
        raise ToolError(
            f"{found['name']} did not load: {found['cause']}. check_fit shows whether it fits; unload_model "
            "makes room."
        )
    return {"model": _brief(found)}


async def _wait(
    seconds: float,
    look: Callable[[], Awaitable[dict[str, Any]]],
    is_over: Callable[[dict[str, Any]], bool],
    describe: Callable[[dict[str, Any]], tuple[float, float | None, str]],
    report: Report,
) -> dict[str, Any]:
    """Poll until it has ended or `seconds` have passed, and report each change."""
    clock = asyncio.get_running_loop().time
    end, said = clock() + seconds, None
    while True:
        now = await look()
        if (at := describe(now)) != said:
            said = at
            await report(*at)
        if is_over(now) or clock() >= end:
            return now
        await asyncio.sleep(min(LOOK_AGAIN, max(0.0, end - clock())))


async def _unload(api: ToolApi, given: UnloadArguments, _: Report) -> Any:
    return await api.post("/admin/api/models/unload", {"model": given.model})


async def _requests(api: ToolApi, given: RequestsArguments, _: Report) -> Any:
    query: dict[str, Any] = {"limit": given.limit, "errors": given.errors}
    if given.model is not None:
        query["model"] = given.model
    return await api.caller.own_requests(query)


async def _ask(api: ToolApi, given: AskArguments, _: Report) -> Any:
    messages = [{"role": "user", "content": given.prompt}]
    if given.system:
        messages.insert(0, {"role": "system", "content": given.system})
    body = {"model": given.model, "messages": messages, "max_tokens": given.max_tokens}
    answer = await api.post("/v1/chat/completions", body, seconds=None)
    choice = answer["choices"][0]
    return {
        "answer": choice["message"].get("content") or "",
        "finish_reason": choice["finish_reason"],
        "usage": answer["usage"],
    }


TOOLS: Final[dict[str, Tool]] = {
    tool.name: tool
    for tool in (
        Tool(
            name="list_models",
            title="List models",
            description="List the models that requests may name: in memory, and on disk where a request "
            "loads them.",
            arguments=NoArguments,
            run=_list_models,
            scope=None,
        ),
        Tool(
            name="running_models",
            title="Models in memory",
            description="List the models in memory with state, context, memory and open requests; loading "
            "and failed ones too, with the cause.",
            arguments=NoArguments,
            run=_running,
        ),
        Tool(
            name="models_on_disk",
            title="Models on disk",
            description="List the models on this disk with their size and whether they can be served.",
            arguments=NoArguments,
            run=_page("/admin/api/disk"),
        ),
        Tool(
            name="recommended_models",
            title="Recommended models",
            description="List recommended models by purpose and short name, with size, license and how each "
            "fits this machine. The hub is not asked.",
            arguments=NoArguments,
            run=_page("/admin/api/recommended"),
        ),
        Tool(
            name="search_models",
            title="Search the hub",
            description="Search the hub for models by name, with whether each fits this machine.",
            arguments=SearchArguments,
            run=_search,
            reaches_out=True,
        ),
        Tool(
            name="check_fit",
            title="Does a model fit?",
            description="Report whether a model fits this machine, with context, memory and expected speed. "
            "Of a model on the hub only the headers are read.",
            arguments=ModelArgument,
            run=_fit,
            reaches_out=True,
        ),
        Tool(
            name="pull_model",
            title="Download a model",
            description="Download a model from the hub, or resume a download, and wait up to wait_s seconds. "
            "Call it again to wait longer: it continues.",
            arguments=PullArguments,
            run=_pull,
            changes=True,
            reaches_out=True,
        ),
        Tool(
            name="list_downloads",
            title="Downloads",
            description="List downloads with state, bytes done and speed.",
            arguments=NoArguments,
            run=_downloads,
        ),
        Tool(
            name="load_model",
            title="Load a model",
            description="Load a model that is on disk into memory, and wait up to wait_s seconds. Idle "
            "models may be evicted for it.",
            arguments=LoadArguments,
            run=_load,
            changes=True,
        ),
        Tool(
            name="unload_model",
            title="Unload a model",
            description="Unload a model from memory; its open requests end. Its files stay on disk.",
            arguments=UnloadArguments,
            run=_unload,
            changes=True,
            destructive=True,
        ),
        Tool(
            name="list_requests",
            title="Request log",
            description="List recent requests and those in flight: model, status, tokens and times, no "
            "prompts. A key without the scope admin sees its own.",
            arguments=RequestsArguments,
            run=_requests,
            scope="key",
        ),
        Tool(
            name="get_stats",
            title="Load and throughput",
            description="Return running and waiting requests, KV cache use and token counters, in sum and by "
            "model.",
            arguments=NoArguments,
            run=_page("/admin/api/stats"),
        ),
        Tool(
            name="get_metrics",
            title="Prometheus metrics",
            description="Return all metrics in Prometheus's text format.",
            arguments=NoArguments,
            run=_page("/metrics"),
            scope="read",
        ),
        Tool(
            name="run_doctor",
            title="Check the machine",
            description="Run the checks of llmbox doctor; every finding comes with a fix.",
            arguments=NoArguments,
            run=_page("/admin/api/doctor"),
        ),
        Tool(
            name="ask_model",
            title="Ask a model",
            description="Send one prompt to a chat model on this machine and return its answer.",
            arguments=AskArguments,
            run=_ask,
            scope="infer",
        ),
    )
}
