"""`previous_response_id`: the conversation that a request goes on with, from what is stored."""

from typing import Any

from ...errors import ApiError
from ..openai.context import Call
from ..openai.stored_pages import not_found

_PARAM = "previous_response_id"


async def items_before(call: Call, previous: str | None) -> list[dict[str, Any]]:
    """What was asked and answered until then, oldest first; instructions are not part of it.

    Raises ApiError: 404 where a response of the conversation is not there or not the caller's, 400 where
    the last one has not ended.
    """
    if previous is None:
        return []
    owner = call.services.security.owner_id(call.caller)
    if call.services.background.look((owner, previous)) is not None:
        raise ApiError(400, f"The response {previous!r} has not ended yet.", "response_in_progress", _PARAM)
    most = call.limits.messages
    chain = await call.services.stored.chain("response", owner, previous, most)
    missing = chain[0].previous if chain else previous
    if missing and len(chain) == most:
        raise ApiError(400, f"A conversation has at most {most} responses.", "invalid_value", _PARAM)
    if missing:
        raise not_found("response", missing, _PARAM, code="previous_response_not_found")
    return [item for turn in chain for item in (*turn.input, *turn.answer["output"])]
