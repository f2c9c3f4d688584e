"""Everything here runs in Triton's interpreter: float16 and float32, as its bfloat16 products are wrong."""

from collections.abc import Iterator

import pytest

from support.poison import poisoned_memory
from support.triton_interpreter import turn_on

turn_on()


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    with poisoned_memory():
        yield
