import asyncio
from types import SimpleNamespace

import pytest

from llmbox.app.errors import ApiError
from llmbox.app.gateway.open_request import OpenRequest


def ending(error: BaseException | None) -> tuple[int, str, str]:
    """Status, code and reason of a request whose reader ends with `error`."""
    ends = []
    opened = OpenRequest(
        SimpleNamespace(prompts=[[1]]), [], lambda request, *end: ends.append((*end, request.reason)), print
    )
    kind = None if error is None else type(error)
    opened.__exit__(kind, error, None)
    return ends[0]


@pytest.mark.parametrize("error", [None, asyncio.CancelledError(), GeneratorExit(), ConnectionResetError()])
def test_a_reader_that_left(error):
    assert ending(error) == (499, "client_disconnected", "")


def test_an_answer_that_could_not_be_made_is_a_failure_of_the_server():
    """It was logged as a client that left."""
    assert ending(ValueError("inside"))[:2] == (500, "internal_error")
    assert ending(ApiError(502, "Too long.", "too_long")) == (502, "too_long", "Too long.")
