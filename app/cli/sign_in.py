"""The way into the panel for whoever may use the daemon's unix socket."""

from .program import Program


def sign_in_link(program: Program) -> str:
    """A new one-time link from the running daemon, good for 15 minutes. Raises CliError."""
    url: str = program.client.post("/admin/api/signin-link", {})["url"]
    return url
