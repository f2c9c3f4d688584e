"""The panel of a daemon with a fake engine, and a browser that is signed in to it."""

from support.browser import axe, browser, context, window
from support.panel_box import panel, signed_in

__all__ = ["axe", "browser", "context", "panel", "signed_in", "window"]
