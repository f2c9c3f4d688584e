"""`llmbox up` and `llmbox serve`: start the daemon, and the link that signs a browser in."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...config.entries import Scalar
from ...errors import CliError, Exit
from ...integrations.guides import KEY_VARIABLE
from ...lifecycle.instance import RunningDaemon, find_running
from ...lifecycle.program import Command, Program, json_option, pass_program, require_single
from ...models.load_request import ModelRequest
from ...util.formatting import format_setting
from .. import output
from ..admin.connect import needs_key
from ..models.pull import fetch_missing
from ..options import checked_alias, daemon_options, flag, mmproj_option, model_options, parameter, read_flags
from .daemon_starter import Started, start_daemon, wait_for_models

if TYPE_CHECKING:
    from ...lifecycle.instance import RunningDaemon


def sign_in_link(program: Program) -> str:
    """Request a new one-time link from the running daemon, good for 15 minutes. Raises CliError."""
    url: str = program.client.post("/admin/api/signin-link", {})["url"]
    return url


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@daemon_options
@model_options
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    metavar="NAME=DIR",
    help="Add the LoRA adapter in DIR under NAME; its base is the first MODEL. May be repeated.",
)
@mmproj_option
@click.option("--wait/--no-wait", default=True, help="Wait until the models are ready (default).")
@click.option("--timeout", type=click.FloatRange(0), default=600.0, metavar="S", help="Seconds to wait.")
@click.option("--yes", is_flag=True, help="Download models that are not on this disk without asking.")
@click.option("--open", "open_panel", is_flag=True, help="Open the panel in the browser, signed in.")
@json_option
@pass_program
def up(
    program: Program,
    /,
    models: tuple[str, ...],
    alias: str | None,
    mmproj: str | None,
    *,
    adapters: tuple[str, ...],
    wait: bool,
    timeout: float,
    yes: bool,
    open_panel: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Start the daemon in the background and wait until it is ready.

    A second start changes nothing. A MODEL is builtin, a directory, a GGUF file, org/name, or a short name
    such as qwen3:4b. A model that is not on this disk is downloaded first, after asking.
    """
    given_flags = read_flags(flags)
    alias = checked_alias(alias)
    program.settings(given_flags)
    names: list[str] = []
    if mmproj is not None:
        require_single(models, mmproj, "--mmproj")
        models = (program.with_projector(models[0], mmproj),)
    if models:
        require_single(models, alias)
        fetch_missing(program, models, _server_flags(given_flags), yes=yes)
    _add_adapters(program, adapters, models)
    started = _find_or_start(program, models, alias, given_flags)
    if started.process is not None:
        names = [model.served_name for model in program.find_models(models, alias, given_flags)]
    else:
        require_same(program, given_flags, of_models=not models)
        names = load_missing(program, program.find_models(models, alias, given_flags) if models else [])
    ready = wait_for_models(program, started, names, timeout) if wait else []
    panel = sign_in_link(program)
    if as_json:
        output.write_json("up", {**_summary(started, ready, waited=wait), "sign_in": panel})
    else:
        _print(program, started.running, ready, panel, waited=wait)
    if open_panel:
        _open(panel)


def _server_flags(flags: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {name: value for name, value in flags.items() if name.startswith("server.")}


def _add_adapters(program: Program, adapters: Sequence[str], models: Sequence[str]) -> None:
    """Add adapters, or replace those of the same names."""
    from ...models.adapters import add_adapter

    for text in adapters:
        name, sign, folder = text.partition("=")
        if not sign or not folder:
            raise CliError(
                f"{text!r} names no adapter", "it is written NAME=DIR", "llmbox up --help", Exit.USAGE
            )
        base = models[0] if models else None
        memory = program.in_memory()
        add_adapter(program.registry, program.environ, name, Path(folder), base, memory, may_replace=True)


def _open(link: str) -> None:
    import webbrowser

    if not webbrowser.open(link):
        output.say("No browser could be opened here: use the link.")


def _find_or_start(
    program: Program, models: Sequence[str], alias: str | None, flags: Mapping[str, Scalar]
) -> Started:
    running = find_running(program.paths)
    if running is None:
        program.find_models(models, alias, flags)  # a wrong name needs no daemon
        output.say("Starting the daemon…")
        try:
            return start_daemon(program, models, alias, flags)
        except CliError as error:
            # Another `up` may have been a moment faster.
            running = find_running(program.paths) if error.exit == Exit.CONFLICT else None
            if running is None:
                raise
    return Started(running, None, 0)


def load_missing(program: Program, wanted: Sequence[ModelRequest]) -> list[str]:
    """Request loads of the models that the daemon does not have. Returns the names of all `wanted` ones."""
    loaded = {
        name: model
        for model in program.client.get("/admin/api/models")["models"]
        if model["state"] != "failed"
        for name in (model["name"], *model["aliases"])
    }
    for model in wanted:
        present = loaded.get(model.served_name)
        if present is None:
            output.say(f"Loading {model.served_name}…")
            program.client.post("/admin/api/models/load", model.body())
        else:
            _require_same_options(model, present)
    return [model.served_name for model in wanted]


def require_same(program: Program, flags: Mapping[str, Scalar], *, of_models: bool) -> None:
    """Check that flags equal those of the running daemon; `of_models`: model flags too. Raises CliError (exit
    9).
    """
    daemon_flags = {name: value for name, value in flags.items() if of_models or name.startswith("server.")}
    if not daemon_flags:
        return
    running = program.client.get("/admin/api/config")["settings"]
    differing = [
        _difference(name, running[name]["value"], value)
        for name, value in daemon_flags.items()
        if running[name]["value"] != value
    ]
    if differing:
        raise _conflict("the daemon runs with other settings", differing)


def _difference(name: str, running: object, wanted: object) -> str:
    with_, for_ = (format_setting(value) or "nothing" for value in (running, wanted))
    return f"{name}: runs with {with_}, asked for {for_}"


def _require_same_options(wanted: ModelRequest, present: Mapping[str, Any]) -> None:
    runs_with = {name: present["options"][parameter(name)] for name in wanted.options}
    differing = [
        _difference(flag(name), runs_with[name], value)
        for name, value in wanted.options.items()
        if runs_with[name] != value
    ]
    if differing:
        raise _conflict(f"{present['name']} is loaded with other settings", differing)


def _conflict(what: str, differing: Sequence[str]) -> CliError:
    return CliError(what, "; ".join(differing), "llmbox down, then the same command again", Exit.CONFLICT)


def _summary(started: Started, models: Sequence[Mapping[str, Any]], *, waited: bool) -> dict[str, Any]:
    running = started.running
    return {
        "url": f"{running.url}/v1",
        "pid": running.pid,
        "port": running.port,
        "socket": running.socket,
        "started": started.process is not None,
        "waited": waited,
        "models": [{"name": m["name"], "state": m["state"], "context": _context(m)} for m in models],
    }


def _context(model: Mapping[str, Any]) -> int | None:
    info = model.get("info")
    return info["context_window"] if info else None


def _print(
    program: Program, running: RunningDaemon, models: Sequence[Mapping[str, Any]], panel: str, *, waited: bool
) -> None:
    llmbox = shlex.join(["llmbox", *program.location_flags])
    output.write(f"llmbox is up (pid {running.pid})")
    output.write(f"  API     {running.url}/v1")
    output.write(f"  Panel   {panel}")
    output.write("          (signs one browser in, once, within 15 minutes)")
    if running.certificate:
        output.write(f"  TLS     {running.certificate}")
        output.write("          (clients that do not trust it yet take it with SSL_CERT_FILE or --cacert)")
    if not waited:
        output.write(f"  Models  loading; follow with {llmbox} ps")
        return
    words = [f"{m['name']} (context {_context(m)} tokens)" for m in models]
    output.write(f"  Models  {', '.join(words) or 'none; load one with {llmbox} load MODEL'}")
    if models:
        output.write("")
        key = KEY_VARIABLE if needs_key(program) else ""
        output.write(f"Try it, with {key} set to a key (llmbox key add NAME):" if key else "Try it:")
        output.write(_curl(running, models[0], key))
        if (models[0].get("info") or {}).get("generates", True):
            output.write(f"  {llmbox} run {models[0]['name']}")
    output.write("")
    output.write(f"Watch it: {llmbox} top    Stop it: {llmbox} down")


def _curl(running: RunningDaemon, model: Mapping[str, Any], key: str) -> str:
    """Format a request. `key`: variable with an API key; empty where none is needed."""
    body: dict[str, Any] = {"model": model["name"]}
    info = model.get("info") or {}
    if info.get("num_labels"):
        path, body["query"], body["documents"] = "rerank", "What is llmbox?", ["A daemon.", "A fruit."]
    elif not info.get("generates", True):
        path, body["input"] = "embeddings", "What is llmbox?"
    elif model["chat"]:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "What is llmbox?"}]
    else:
        path, body["prompt"], body["max_tokens"] = "completions", "Once upon a time", 32
    trust = f" --cacert {shlex.quote(running.certificate)}" if running.certificate else ""
    header = "-H 'Content-Type: application/json'" + (f' -H "Authorization: Bearer ${key}"' if key else "")
    return f"  curl{trust} {running.url}/v1/{path} {header} \\\n    -d '{json.dumps(body)}'"


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@daemon_options
@model_options
@click.option("--background", is_flag=True, hidden=True, help="Log to the file only; set by `up`.")
@pass_program
def serve(
    program: Program, /, models: tuple[str, ...], alias: str | None, *, background: bool, **flags: Any
) -> None:
    """Run the daemon in the foreground, for systemd, containers and debugging.

    A MODEL is builtin, a directory, a GGUF file, or org/name from the Hugging Face cache. SIGTERM lets
    open requests finish, a second one stops at once, SIGHUP reads the configuration again.
    """
    from ...daemon.run import DaemonOptions, run_daemon
    from ...lifecycle.instance import already_running, find_running

    if (other := find_running(program.paths)) is not None:  # before complaints about models
        raise already_running(other)
    given_flags = read_flags(flags)
    plan = DaemonOptions(
        paths=program.paths,
        loaded=program.settings(given_flags),
        models=program.find_models(models, checked_alias(alias), given_flags),
        begun_with={"flags": given_flags, "models": list(models), "alias": alias},
        reload=lambda: program.settings(given_flags),
        checks=partial(_checks, program),
        parts=program.parts,
        on_up=(lambda *_: None) if background else partial(_print_addresses, program),
        background=background,
    )
    run_daemon(plan)


def _checks(program: Program) -> list[dict[str, str]]:
    from dataclasses import asdict

    from ...diagnostics.checks import run_checks

    return [asdict(finding) for finding in run_checks(program)]


def _print_addresses(program: Program, running: "RunningDaemon", sign_in_link: Callable[[], str]) -> None:
    output.write(f"{running.url}/v1")
    if not _is_journal():
        output.write(sign_in_link())
        return
    from ...util.atomic_file import write_whole

    # Others may read the journal, and it is kept: a link in it would be a key under the mat.
    write_whole(program.paths.sign_in_file, f"{sign_in_link()}\n".encode())
    output.write(f"The link that signs one browser in, within 15 minutes: {program.paths.sign_in_file}")


def _is_journal() -> bool:
    """Return True if a service manager keeps our output."""
    started_by_systemd = "NOTIFY_SOCKET" in os.environ or "JOURNAL_STREAM" in os.environ
    return started_by_systemd and not sys.stdout.isatty()
