"""All routes of the daemon in one application, as it composes them."""

import warnings

from litestar import Litestar
from litestar.exceptions import LitestarWarning

from llmbox.app.http.admin import admin_router
from llmbox.app.http.auth.sign_in_routes import sign_in_routes
from llmbox.app.http.common_routes import common_routes
from llmbox.app.http.openai import openai_router
from llmbox.app.http.server.request import StrictRequest
from llmbox.ui.web import panel_routes


def test_no_route_is_written_in_a_way_that_goes_away():
    with warnings.catch_warnings():
        warnings.simplefilter("error", LitestarWarning)
        warnings.simplefilter("error", DeprecationWarning)
        Litestar(
            [admin_router, openai_router, *common_routes, *sign_in_routes, *panel_routes],
            openapi_config=None,
            request_class=StrictRequest,
        )
