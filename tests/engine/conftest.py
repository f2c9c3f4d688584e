import sys

import pytest


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Two test processes share the cores. Tests of folders without torch do not import it here."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
