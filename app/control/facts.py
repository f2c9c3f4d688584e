"""What is known of a model before it is loaded, wherever it is."""

from collections.abc import Mapping

from llmbox.engine.errors import EngineError

from ..catalog import HUB_ID, ModelRef, hub_cache, resolve
from ..errors import CliError, Exit
from ..hub.errors import HubError
from ..hub.facts import Facts, local_facts, remote_facts
from ..hub.listing import Hub
from ..registry import Names


def find_facts(
    model: str, environ: Mapping[str, str], names: Names, memory: Mapping[str, ModelRef] | None = None
) -> tuple[Facts, ModelRef]:
    """From this disk if it is there, else from the hub. Raises CliError."""
    try:
        ref = resolve(model, environ, names, memory)
        return local_facts(ref), ref
    except CliError as error:
        match = HUB_ID.fullmatch(model)
        if error.exit != Exit.NOT_FOUND or match is None:
            raise
    except EngineError as error:
        raise CliError(
            f"{model} cannot be served", str(error), "llmbox search TEXT", Exit.DOES_NOT_FIT
        ) from error
    try:
        facts = remote_facts(Hub.of_environment(), match["repo"], match["revision"])
    except HubError as error:
        raise CliError(error.what, error.why, error.fix, error.exit) from error
    return facts, ModelRef(model, hub_cache(environ), "hub")
