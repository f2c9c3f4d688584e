"""Time limits while a model loads: the limit that ends names the error, in every route."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmbox.app.config.settings import LimitSettings
from llmbox.app.errors import ApiError
from llmbox.app.http.openai.request_context import Deadlines, RequestContext
from llmbox.app.security.security import Identity


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
