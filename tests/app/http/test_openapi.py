"""The API's description is made without side effects."""

import logging

from llmbox.app.http.app import document
from llmbox.app.http.common_routes import common_routes


def test_describing_the_api_leaves_the_daemons_log_alone():
    root = logging.getLogger()
    mine = logging.NullHandler()
    root.addHandler(mine)
    before, level = list(root.handlers), root.level
    try:
        document(common_routes, "1")
        assert root.handlers == before
        assert root.level == level
    finally:
        root.handlers[:] = [handler for handler in before if handler is not mine]
        root.setLevel(level)
