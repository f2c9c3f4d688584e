"""`/v1/models` in Anthropic's shape, with pages; other clients get OpenAI's list."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from litestar.connection import ASGIConnection
from msgspec import Struct

from ..errors import ApiError


class ListedModel(Protocol):
    """Model entry in OpenAI's shape."""

    id: str
    created: int
    context_window: int


class AnthropicModel(Struct, kw_only=True):
    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    """Both are the context: prompt and answer share it."""
    lifecycle: Literal["active"] = "active"
    deprecated_at: None = None
    retires_at: None = None
    line: None = None
    capabilities: None = None


class AnthropicModelPage(Struct, kw_only=True):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def is_anthropic_client(connection: ASGIConnection[Any, Any, Any, Any]) -> bool:
    return "anthropic-version" in connection.headers or "x-api-key" in connection.headers


def model_info(model: ListedModel) -> AnthropicModel:
    return AnthropicModel(
        id=model.id,
        display_name=model.id.rpartition("/")[2],
        created_at=datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=model.context_window,
        max_tokens=model.context_window,
    )


def model_page(
    models: Sequence[ListedModel], limit: int, after_id: str | None, before_id: str | None
) -> AnthropicModelPage:
    """Return one page of `models`. Raises ApiError where a cursor names no listed model."""
    if after_id and before_id:
        raise ApiError(
            400, "'before_id' cannot be combined with 'after_id'.", code="invalid_value", param="before_id"
        )
    ids = [model.id for model in models]
    if cursor := after_id or before_id:
        if cursor not in ids:
            raise ApiError(
                404,
                f"The model {cursor!r} does not exist here.",
                code="model_not_found",
                param="after_id" if after_id else "before_id",
            )
        place = ids.index(cursor)
        models = models[place + 1 :] if after_id else models[:place]
    shown = [model_info(model) for model in (models[-limit:] if before_id else models[:limit])]
    return AnthropicModelPage(
        data=shown,
        has_more=len(models) > limit,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )
