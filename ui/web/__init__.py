"""The admin panel: pages made on the server, live pieces over server-sent events."""

from .routes import panel_routes

__all__ = ["panel_routes"]
