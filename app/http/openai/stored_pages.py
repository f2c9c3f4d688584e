"""What lists of stored things have in common: OpenAI's cursors."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from litestar.params import FromQuery, QueryParameter
from msgspec import Struct

from ...errors import ApiError
from ...services import Services
from ..credentials import identity_of
from .context import HttpRequest

After = Annotated[str | None, QueryParameter(max_length=512, description="Id of the last one before.")]
Limit = Annotated[int, QueryParameter(ge=1, le=100)]
Order = FromQuery[Literal["asc", "desc"]]


class Page(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(Struct, kw_only=True):
    id: str
    object: str
    deleted: Literal[True] = True


def page_of(items: Sequence[dict[str, Any]], limit: int) -> Page:
    """Of the first `limit` items; one more tells that there is a next page."""
    shown = list(items[:limit])
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return Page(data=shown, first_id=first, last_id=last, has_more=len(items) > limit)


def page_after(items: Sequence[dict[str, Any]], after: str | None, limit: int, order: Order) -> Page:
    """Of all `items`, given oldest first. Raises ApiError 404 where `after` is none of them."""
    ordered = list(items if order == "asc" else reversed(items))
    if after is not None:
        place = next((n for n, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise not_found("item", after, "after")
        ordered = ordered[place + 1 :]
    return page_of(ordered, limit)


def not_found(what: str, id_: str, param: str, *, code: str | None = None) -> ApiError:
    """The same for what never was, was deleted or has expired, and what another key stored."""
    return ApiError(
        404,
        f"There is no stored {what} {id_!r} of yours. Only requests with 'store': true are stored.",
        code=code or f"{what.replace(' ', '_')}_not_found",
        param=param,
    )


def services_and_owner(request: HttpRequest) -> tuple[Services, str]:
    services: Services = request.app.state.services
    return services, services.security.owner_id(identity_of(request))
