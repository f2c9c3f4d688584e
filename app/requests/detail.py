"""All that is known of one request, as far as its reader may see it."""

from dataclasses import dataclass

from ..control.control import Control
from ..errors import ApiError
from ..gateway.live_request import LiveRequest
from ..security.identity import Identity
from ..services import Services
from ..store.content import Content
from ..store.record import RequestRecord
from .explain import content_note, prefix_note
from .snippets import as_curl, as_python


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One of `in_flight` and `request` is there. The notes are sentences, or empty."""

    in_flight: LiveRequest | None = None
    request: RequestRecord | None = None
    prefix_note: str = ""
    content: Content | None = None
    content_note: str = ""
    curl: str = ""
    python: str = ""


async def detail_of(control: Control, identity: Identity, request_id: str) -> Detail:
    """Raises ApiError 404."""
    services = control.services
    live = next((each for each in services.gateway.in_flight() if each.id == request_id), None)
    if live is not None:
        return Detail(in_flight=live, prefix_note=prefix_note(live))
    record, content, foreign = await logged(services, identity, request_id)
    days = services.request_log.keep.content_days
    return Detail(
        request=record,
        prefix_note=prefix_note(record),
        content=content,
        content_note=content_note(record, content, days, foreign=foreign),
        curl=as_curl(control.running.url, record, content),
        python=as_python(control.running.url, record, content),
    )


async def logged(
    services: Services, identity: Identity, request_id: str
) -> tuple[RequestRecord, Content | None, bool]:
    """(record, what of its content this reader may see, whether there is more). Raises ApiError 404."""
    found = await services.request_log.get_with_content(request_id)
    if found is None:
        raise ApiError(404, f"No request {request_id!r} is known.", "request_not_found", "request_id")
    record, content = found
    if content is None or services.security.may_read(identity, content.owner):
        return record, content, False
    return record, None, True
