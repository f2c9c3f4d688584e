"""`llmbox load`, `pin`, `unpin` and `unload`."""

from collections.abc import Mapping
from typing import Any

import click

from ...admin_client import TIMEOUT, ApiRefusal
from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, pass_program
from ...models.load_request import ModelRequest
from ...util import formatting
from ...util.formatting import did_you_mean
from .. import output
from ..options import checked_alias, mmproj_option, model_options, read_flags
from ..server.daemon_starter import Started, wait_for_models


@click.command(cls=Command)
@click.argument("model")
@model_options
@mmproj_option
@click.option("--ttl", type=click.FloatRange(0, 1e7), metavar="S", help="Unload after S idle seconds.")
@click.option("--estimate-only", is_flag=True, help="Show what it would need; load nothing.")
@click.option("--wait/--no-wait", default=True, help="Wait until the model is ready (default).")
@click.option("--timeout", type=click.FloatRange(0), default=600.0, metavar="S", help="Longest wait.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def load(
    program: Program,
    /,
    model: str,
    alias: str | None,
    mmproj: str | None,
    *,
    ttl: float | None,
    estimate_only: bool,
    wait: bool,
    timeout: float,
    as_json: bool,
    **flags: Any,
) -> int:
    """Load a model into the running daemon."""
    model = program.with_projector(model, mmproj)
    (wanted,) = program.find_models([model], checked_alias(alias), read_flags(flags))
    if estimate_only:
        return estimate(program, wanted, as_json=as_json)
    running = find_running(program.paths)
    if running is None:
        raise program.client.not_running()
    body = {**wanted.body(), "ttl": ttl}
    answer = program.client.post("/admin/api/models/load", body)["model"]
    if wait:
        (answer,) = wait_for_models(program, Started(running, None, 0), [wanted.served_name], timeout)
    if as_json:
        output.write_json("load", {"model": answer})
    elif wait:
        print_ready(answer["name"], answer["info"])
    else:
        output.say(f"{answer['name']} is loading; follow with llmbox ps.")
    return Exit.OK


def print_ready(name: str, info: Mapping[str, Any]) -> None:
    """Report that a model is ready, with its memory and the engine's notes."""
    total = info["weights_bytes"] + info["kv_bytes"] + info["workspace_bytes"]
    output.say(
        f"{name} is ready: context {info['context_window']} tokens, {formatting.size(total)} of memory "
        f"({formatting.size(info['kv_bytes'])} of it KV cache)."
    )
    for note in info["notes"]:
        output.say(f"Note: {note}")


def estimate(program: Program, wanted: ModelRequest, *, as_json: bool) -> int:
    from llmbox.engine.errors import EngineError

    from ...hub.model_info import local_facts
    from .fit import report

    try:
        facts = local_facts(wanted.ref)
    except EngineError as error:
        raise CliError(f"cannot estimate {wanted.served_name}", str(error), "llmbox ls") from error
    return report(program, facts, wanted.config(program.settings().settings.model), as_json=as_json)


@click.command(cls=Command)
@click.argument("model")
@pass_program
def pin(program: Program, *, model: str) -> None:
    """Keep MODEL in memory: it is neither evicted for others nor unloaded when idle."""
    _pin(program, model, pinned=True)


@click.command(cls=Command)
@click.argument("model")
@pass_program
def unpin(program: Program, *, model: str) -> None:
    """Unpin MODEL: it may be evicted again."""
    _pin(program, model, pinned=False)


def _pin(program: Program, model: str, *, pinned: bool) -> None:
    answer = _post(program, "pin", {"model": model, "pinned": pinned})["model"]
    output.say(f"{answer['name']} is {'pinned' if pinned else 'not pinned any more'}.")


def _post(program: Program, what: str, body: Mapping[str, Any], timeout: float = TIMEOUT) -> dict[str, Any]:
    """Post a request about a model in memory. The error for a model that is not there names the nearest."""
    try:
        return program.client.post(f"/admin/api/models/{what}", body, timeout=timeout)
    except ApiRefusal as error:
        if error.code == "model_not_found" and isinstance(body["model"], str):
            error.fix = f"{did_you_mean(body['model'], program.in_memory())}llmbox ps"
        raise


@click.command(cls=Command)
@click.argument("model", required=False)
@click.option("--all", "every", is_flag=True, help="All models.")
@pass_program
def unload(program: Program, model: str | None, *, every: bool) -> None:
    """Unload a model from memory. Its open requests end with an error."""
    if (model is None) != every:
        raise CliError("which model?", "one MODEL or --all is needed", "llmbox ps", Exit.USAGE)
    answer = _post(program, "unload", {"model": model}, timeout=60.0)
    for name in answer["unloaded"]:
        output.say(f"{name} is unloaded.")
