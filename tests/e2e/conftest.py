"""Clients of the module's `server`."""

import httpx
import pytest

from support.cli_box import PATIENCE


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        yield http


@pytest.fixture(scope="module")
def client(server):
    with server.client() as client:
        yield client
