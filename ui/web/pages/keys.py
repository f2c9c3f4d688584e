"""API keys page. A secret is shown only in the response to the form that created it."""

import time
from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath

from llmbox.app.errors import ApiError
from llmbox.app.http.admin.keys import changing, revoke
from llmbox.app.http.server.request import form_of
from llmbox.app.security.key_store import view
from llmbox.app.security.keys import ApiKey, KeyChange, KeySpec
from llmbox.app.store.usage import usage_by_key

from ..render import PanelRequest, done, page, panel_of

BACK = "/admin/keys"
DAY = 86400.0
LIMITS = (
    ("rpm", "Requests per minute", ""),
    ("requests_day", "Requests per day", ""),
    ("requests_month", "Requests per month", ""),
    ("tpm", "Tokens per minute", "Prompts and answers together."),
    ("tokens_day", "Tokens per day", ""),
    ("tokens_month", "Tokens per month", ""),
    ("budget_day", "Budget per day", ""),
    ("budget_month", "Budget per month", ""),
)
"""(field of a key, label, hint) of its limits."""
LIVES = (("", "Never"), ("1", "In a day"), ("30", "In 30 days"), ("90", "In 90 days"), ("365", "In a year"))


@get("/keys", name="panel_keys")
async def keys_page(request: PanelRequest) -> Response[str]:
    return await _page(request)


@post("/keys", status_code=200, name="panel_key_add")
async def add_key(request: PanelRequest) -> Response[str]:
    form = await form_of(request)
    keys = panel_of(request).services.security.keys
    try:
        spec = _spec(form)
        key, secret = await changing(lambda: keys.add(spec))
    except ApiError as error:
        return await _page(request, error.status, problem=error.message, form=form)
    return await _page(request, 201, made=key, secret=secret)


@post("/keys/{name:str}/limits", status_code=200, name="panel_key_limits")
async def change_limits(request: PanelRequest, name: FromPath[str]) -> Response[str]:
    """Replace all limits of a key by those of the form: an empty field removes one."""
    form = await form_of(request)
    keys = panel_of(request).services.security.keys
    values: dict[str, Any] = {field: None for field, _, _ in LIMITS} | _limits(form)
    if priority := form.get("priority", "").strip():
        values["priority"] = _whole(priority, "priority")
    try:
        change = msgspec.convert(values, KeyChange)
    except msgspec.ValidationError as error:
        raise ApiError(400, _format_error(str(error)), "invalid_value") from error
    await changing(lambda: keys.change(name, change))
    return done(request, BACK, f"Changed the limits of {name}. They apply to new requests.")


@post("/keys/{name:str}/rotate", status_code=200, name="panel_key_rotate")
async def rotate_key(request: PanelRequest, name: FromPath[str]) -> Response[str]:
    keys = panel_of(request).services.security.keys
    key, secret = await changing(lambda: keys.rotate(name))
    return await _page(request, made=key, secret=secret)


@post("/keys/{name:str}/revoke", status_code=200, name="panel_key_revoke")
async def revoke_key(request: PanelRequest, name: FromPath[str]) -> Response[str]:
    await revoke(panel_of(request).services, name)
    return done(request, BACK, f"Revoked {name}: it is refused from now on.")


async def _page(
    request: PanelRequest,
    status: int = 200,
    *,
    made: ApiKey | None = None,
    secret: str = "",
    problem: str = "",
    form: dict[str, str] | None = None,
) -> Response[str]:
    panel = panel_of(request)
    security = panel.services.security
    return page(
        request,
        "keys.html",
        "keys",
        status,
        keys=[view(key, security.used, security.quotas) for key in security.keys.list()],
        limits=LIMITS,
        currency=panel.services.settings.usage.currency,
        priced=bool(panel.services.settings.usage.prices),
        usage=await usage_by_key(panel.services.request_log),
        made=made,
        secret=secret,
        problem=problem,
        form=form or {},
        lives=LIVES,
        url=panel.control.running.url,
    )


def _spec(form: dict[str, str]) -> KeySpec:
    """Read the form. Raises ApiError with the field's name."""
    values: dict[str, Any] = {
        "name": form.get("name", "").strip(),
        "scopes": [scope for scope in ("infer", "read", "admin") if form.get(f"scope_{scope}")],
        "models": form.get("models", "").replace(",", " ").split(),
        "log_content": bool(form.get("log_content")),
    }
    values |= _limits(form)
    if text := form.get("priority", "").strip():
        values["priority"] = _whole(text, "priority")
    if days := form.get("expires", ""):
        values["expires"] = time.time() + _whole(days, "expires") * DAY
    try:
        return msgspec.convert(values, KeySpec)
    except msgspec.ValidationError as error:
        raise ApiError(400, _format_error(str(error)), "invalid_value") from error


def _limits(form: dict[str, str]) -> dict[str, float]:
    """Read the limits that the form sets. Raises ApiError."""
    given = {field: form.get(field, "").strip().replace(",", "") for field, _, _ in LIMITS}
    return {
        field: _amount(text, field) if field.startswith("budget") else _whole(text, field)
        for field, text in given.items()
        if text
    }


def _amount(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ApiError(400, f"{name} must be a number, not {text[:40]!r}.", "invalid_value") from None


def _format_error(text: str) -> str:
    field = text.rpartition("$.")[2].strip("`[.]")
    messages = {
        "name": "Names are at most 64 letters, digits and . _ -, and begin with a letter or digit.",
        "scopes": "Choose at least one scope.",
    }
    return messages.get(field, f"{field}: {text.partition(' - ')[0]}.")


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ApiError(400, f"{name} must be a whole number, not {text[:40]!r}.", "invalid_value") from None
