"""`llmbox ray`: a model as an application of Ray Serve, on one box or several."""

import signal
import threading
from typing import Any

import click

from ...errors import CliError, Exit
from ...lifecycle.program import Program, json_option, pass_program
from .. import output
from ..options import checked_alias, model_options, read_flags
from ..root import CommandGroup

_address = click.option(
    "--address",
    default="auto",
    metavar="ADDRESS",
    help="Ray cluster; auto: this machine's, local: a new one that ends with this command.",
)
_name = click.option("--name", default="llmbox", metavar="NAME", help="Name of the application.")
_timeout = click.option(
    "--timeout", type=click.FloatRange(0), default=60.0, metavar="S", help="Seconds to wait."
)


@click.group(cls=CommandGroup, earlier={"delete": "rm"})
def ray() -> None:
    """Run replicas of a model under Ray Serve."""


@ray.command("deploy")
@click.argument("model")
@model_options
@_address
@_name
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Number of replicas; with --max-replicas, the fewest.",
)
@click.option("--max-replicas", type=click.IntRange(1), default=1, metavar="N", help="Scale up to N.")
@click.option(
    "--target",
    type=click.FloatRange(1),
    default=16.0,
    metavar="N",
    help="Target number of open requests per replica for scaling.",
)
@click.option("--cpus", type=click.FloatRange(0), default=1.0, metavar="N", help="CPU cores per replica.")
@click.option("--gpus", type=click.FloatRange(0), default=0.0, metavar="N", help="GPUs per replica.")
@click.option("--host", default="127.0.0.1", metavar="HOST", help="Address that Serve listens on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, metavar="PORT", help="Port of Serve.")
@click.option("--timeout", type=click.FloatRange(0), default=600.0, metavar="S", help="Seconds to wait.")
@pass_program
def deploy(
    program: Program,
    /,
    model: str,
    alias: str | None,
    address: str,
    name: str,
    *,
    replicas: int,
    max_replicas: int,
    target: float,
    cpus: float,
    gpus: float,
    host: str,
    port: int,
    timeout: float,
    **flags: Any,
) -> int:
    """Deploy MODEL, with the HTTP API at --host and --port. The same command again replaces it.

    Every machine needs the model at the same path, and the same version of `llmbox[ray]`.
    """
    from dataclasses import replace

    own = _import_deploy()
    (wanted,) = program.find_models([model], checked_alias(alias), read_flags(flags))
    settings = program.settings().settings
    plan = own.Deployment(
        config=wanted.config(settings.model),
        settings=replace(settings, server=replace(settings.server, host=host)),
        keys_file=program.paths.keys_file.absolute(),
        alias=wanted.extra_alias,
        replicas=replicas,
        most_replicas=max_replicas,
        target=target,
        cpus=cpus,
        gpus=gpus,
    )
    started = own.connect(address, timeout)
    own.deploy(plan, name=name, host=host, port=port, limit=timeout)
    output.say(f"{wanted.served_name} is up under Ray Serve: http://{host}:{port}/v1")
    if started:
        output.say("Ctrl-C ends it.")
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        signal.signal(signal.SIGINT, lambda *_: ended.set())
        ended.wait()
    return Exit.OK


@ray.command("status")
@_address
@_timeout
@json_option
@pass_program
def status(_program: Program, /, address: str, timeout: float, *, as_json: bool) -> int:
    """Show the applications, their deployments and replicas; exit 3 if no Ray answers."""
    own = _import_deploy()
    own.connect(address, timeout)
    applications = own.describe(timeout)
    if as_json:
        output.write_json("ray", {"applications": applications})
        return Exit.OK
    for each in applications:
        output.say(f"{each['application']}: {each['status']} {each['message']}".rstrip())
        for name, found in each["deployments"].items():
            replicas = ", ".join(f"{count} {state}" for state, count in found["replicas"].items())
            output.say(f"  {name}: {found['status']}, {replicas or 'no replicas'}")
    if not applications:
        output.say("No application runs. Deploy one: llmbox ray deploy MODEL")
    return Exit.OK


@ray.command("rm")
@_name
@_address
@_timeout
@pass_program
def rm(_program: Program, /, name: str, address: str, timeout: float) -> int:
    """Delete an application; its open requests end."""
    own = _import_deploy()
    own.connect(address, timeout)
    own.delete(name, timeout)
    output.say(f"{name} is deleted.")
    return Exit.OK


def _import_deploy() -> Any:
    try:
        from ...ray import deploy as own
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise CliError(
            "Ray is not installed", "it is an optional part", "pip install 'llmbox[ray]'", Exit.FAILED
        ) from None
    return own
