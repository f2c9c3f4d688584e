"""Time limits while a model loads: the limit that ends names the error, in every route."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from litestar import post

from llmbox.app.config.settings import LimitSettings
from llmbox.app.errors import ApiError
from llmbox.app.http.auth.guard import Access
from llmbox.app.http.openai.request_context import Deadlines, RequestContext
from llmbox.app.http.server.request import StrictRequest
from llmbox.app.security.keys import KeySpec
from llmbox.app.security.security import Identity
from llmbox.app.tracing.tracer import RequestTracer
from llmbox.app.util.threads import TENANT
from support.http_app import client, guarded, make_app


async def never(name: str) -> Any:
    await asyncio.Event().wait()


def context(*, is_background: bool = False, **limits: float) -> RequestContext:
    settings = SimpleNamespace(limits=LimitSettings(**limits))
    services: Any = SimpleNamespace(find_model=never, settings=settings)
    return RequestContext(
        services, "/v1/embeddings", "exchange", "", Identity("local", is_background=is_background), {}
    )


def code_of(call: RequestContext, deadlines: Deadlines | None = None) -> str | None:
    with pytest.raises(ApiError) as refused:
        asyncio.run(call.find_model("m", deadlines))
    assert refused.value.status == 503
    return cast(str | None, refused.value.code)


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"request_timeout": 0.01}, "request_timeout"),
        ({"first_token_timeout": 0.01}, "first_token_timeout"),
        ({"first_token_timeout": 0.01, "request_timeout": 60.0}, "first_token_timeout"),
        ({"first_token_timeout": 60.0, "request_timeout": 0.01}, "request_timeout"),
    ],
)
def test_configured_limits_hold_while_a_model_loads(limits, code):
    assert code_of(context(**limits)) == code


def test_a_requests_own_limits_go_before():
    call = context(request_timeout=60.0)
    assert code_of(call, Deadlines(None, call.clock.arrived + 0.01)) == "first_token_timeout"


def test_a_background_request_waits_for_its_model():
    call = context(is_background=True, request_timeout=0.01, first_token_timeout=0.01)

    async def wait() -> None:
        await asyncio.wait_for(call.find_model("m"), 0.1)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


@post("/who", status_code=200, opt={"access": Access.INFER})
async def who(request: StrictRequest) -> str:
    await RequestContext.of(request)
    return await asyncio.create_task(tell())


async def tell() -> str:
    return TENANT.get()


async def test_turns_at_slow_work_are_by_key(tmp_path: Path) -> None:
    services: Any = guarded(tmp_path)
    services.gateway = SimpleNamespace(tracer=RequestTracer())
    key, secret = services.security.keys.add(KeySpec(name="k"))
    async with client(make_app([who], services)) as http:
        answer = await http.post("/who", json={}, headers={"Authorization": f"Bearer {secret}"})
        assert answer.text == key.id
