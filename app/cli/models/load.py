"""`llmbox load`, `pin`, `unpin` and `unload`; `llmbox lora` and `llmbox alias`: adapters and names over a
model that is loaded once.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ...admin_client import TIMEOUT, ApiRefusal
from ...errors import CliError, Exit
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...models.adapters import (
    MERGE_JOB,
    add_adapter,
    find_adapter,
    is_from_hub,
    list_adapters,
    remove_adapter,
    require_base,
    resolve_base,
    set_alias,
)
from ...models.catalog import ModelRef, resolve
from ...models.load_request import ModelRequest
from ...util import formatting
from ...util.formatting import did_you_mean
from .. import output
from ..options import checked_alias, mmproj_option, model_options, read_flags
from ..root import CommandGroup
from ..server.daemon_starter import Started, wait_for_models
from .convert import run_job


@click.command(cls=Command)
@click.argument("model")
@model_options
@mmproj_option
@click.option("--ttl", type=click.FloatRange(0, 1e7), metavar="S", help="Unload after S idle seconds.")
@click.option("--estimate-only", is_flag=True, help="Show how much memory it would need; load nothing.")
@click.option("--wait/--no-wait", default=True, help="Wait until the model is ready (default).")
@click.option("--timeout", type=click.FloatRange(0), default=600.0, metavar="S", help="Seconds to wait.")
@json_option
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
@click.option("--all", "every", is_flag=True, help="Unload all models.")
@pass_program
def unload(program: Program, model: str | None, *, every: bool) -> None:
    """Unload a model from memory. Its open requests end with an error."""
    if (model is None) != every:
        raise CliError("which model?", "one MODEL or --all is needed", "llmbox ps", Exit.USAGE)
    answer = _post(program, "unload", {"model": model}, timeout=60.0)
    for name in answer["unloaded"]:
        output.say(f"{name} is unloaded.")


@click.group(cls=CommandGroup, earlier={"list": "ls"})
def lora() -> None:
    """Manage LoRA adapters of models."""


@lora.command("add")
@click.argument("name")
@click.argument("source", metavar="DIR|REPO")
@click.option(
    "--base", metavar="MODEL", help="Base model of the adapter; default: the one named in its config."
)
@json_option
@pass_program
def add(program: Program, *, name: str, source: str, base: str | None, as_json: bool) -> None:
    """Add an adapter under NAME: DIR as PEFT saves it, or REPO of the hub as org/name[@revision].

    Its two files are checked against the base and copied. Requests with "model": NAME then use it; the base
    is loaded on demand, once for all its adapters.
    """
    is_fetched = is_from_hub(source) and not os.path.isdir(source)  # noqa: PTH112 - False for long names, too
    folder = _fetched(program, name, source, base) if is_fetched else Path(source)
    found = add_adapter(program.registry, program.environ, name, folder, base, program.in_memory())
    if as_json:
        output.write_json("lora", asdict(found))
        return
    size = formatting.size(found.nbytes)
    output.say(
        f"{name} is {found.base} with an adapter of rank {found.rank}, {found.modules} modules, {size}."
    )
    output.say(f'Ask it: "model": "{name}", or llmbox run {name}')


def _fetched(program: Program, name: str, source: str, base: str | None) -> Path:
    """Fetch an adapter of the hub while its progress is shown. Ctrl-C stops it; the next one resumes."""
    from ...hub.adapter_download import download_adapter

    line, stop = output.ProgressLine(), threading.Event()

    def report(done: int, total: int) -> None:
        line.update(f"{source}: {formatting.size(done)} of {formatting.size(total)}")

    def check(config: Mapping[str, object]) -> None:
        require_base(program.registry, program.environ, name, config, base, program.in_memory())

    limit = program.settings().settings.hub.bandwidth
    rate = limit and limit * 1e6
    try:
        return download_adapter(
            source,
            program.environ,
            stop=stop,
            report=report,
            note=output.say,
            check=check,
            rate=lambda: rate,
        )
    finally:
        stop.set()
        line.close()


@lora.command("ls")
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@pass_program
def list_(program: Program, *, as_json: bool, quiet: bool) -> None:
    """List the adapters."""
    found = list_adapters(program.registry)
    if as_json:
        output.write_json("adapters", {"adapters": [asdict(each) for each in found]})
    elif quiet:
        for each in found:
            output.write(each.name)
    elif found:
        memory = program.in_memory()
        bases = {each.base: _base_shown(program, each.base, memory) for each in found}
        rows = [
            (each.name, bases[each.base], each.problem or str(each.rank), formatting.size(each.nbytes))
            for each in found
        ]
        output.table(("NAME", "BASE", "RANK", "SIZE"), rows)
    else:
        output.say("No adapters. Add one: llmbox lora add NAME DIR --base MODEL")


def _base_shown(program: Program, base: str, memory: Mapping[str, ModelRef]) -> str:
    try:
        resolve(base, program.environ, program.names, memory)
    except CliError:
        return f"{base} (not here)"
    return base


@lora.command("rm")
@click.argument("name")
@pass_program
def rm(program: Program, *, name: str) -> None:
    """Remove an adapter and its copied files. Its base and the folder it was added from stay."""
    remove_adapter(program.registry, name)
    output.say(f"{name} is no longer an adapter.")


@lora.command("merge")
@click.argument("adapter", metavar="NAME")
@click.option("--base", metavar="MODEL", help="Model to merge into, for an adapter that was not added.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to create.",
)
@json_option
@pass_program
def merge(program: Program, *, adapter: str, base: str | None, out: Path, as_json: bool) -> None:
    """Merge an adapter into its base: a model folder that transformers and vLLM load too.

    NAME is an adapter, or the folder of one that was not added, such as a DoRA adapter, which cannot be
    applied at run time. The base is a checkpoint with 16-bit or 32-bit weights.
    """
    folder, known = find_adapter(program.registry, adapter)
    from llmbox.engine.checkpoint.adapter import read_adapter
    from llmbox.engine.errors import ModelError

    try:
        parsed = read_adapter(folder)
    except ModelError as error:
        raise CliError(
            "not merged", str(error), "docs/adapters.md lists what is supported", Exit.FAILED
        ) from None
    ref = resolve_base(parsed, base or known, program.environ, program.names, program.in_memory())
    target = out.absolute()
    arguments = [str(ref.path), str(folder), "--out", str(target)]
    report = run_job(
        program,
        MERGE_JOB,
        arguments,
        failed="not merged",
        words=lambda _what, done, total: f"merged {done / max(1, total):.0%} of {formatting.size(total)}",
    )
    if as_json:
        output.write_json("merge", {"base": ref.name, "out": str(target), **report})
        return
    output.write(f"{target}")
    output.write(f"Serve it: llmbox up {target}")


@click.group(cls=CommandGroup)
def alias() -> None:
    """Manage aliases: other names of models, and variants with their own parameters."""


@alias.command("set")
@click.argument("name")
@click.argument("ref")
@click.argument("parameters", nargs=-1, metavar="[K=V]...")
@pass_program
def set_(program: Program, *, name: str, ref: str, parameters: tuple[str, ...]) -> None:
    """Make NAME an alias of the model REF.

    Parameters apply where a request does not set them: temperature, top_p, top_k, min_p, repetition_penalty,
    and system, a system prompt. ctx limits the context. All aliases of a model share one loaded copy.
    """
    found = set_alias(
        program.registry, program.environ, name, ref, parameters, program.in_memory()
    ).parameters
    output.say(f"{name} is {ref}" + (f" with {_format_parameters(found)}" if found else "") + ".")


@alias.command("ls")
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@pass_program
def ls(program: Program, *, as_json: bool, quiet: bool) -> None:
    """List the aliases."""
    aliases = program.names.aliases
    if as_json:
        rows = [
            {"name": name, "model": each.model, "parameters": dict(each.parameters)}
            for name, each in aliases.items()
        ]
        output.write_json("aliases", {"aliases": rows})
    elif quiet:
        for name in aliases:
            output.write(name)
    elif aliases:
        rows_ = [
            (name, each.model, _format_parameters(each.parameters)) for name, each in sorted(aliases.items())
        ]
        output.table(("NAME", "MODEL", "PARAMETERS"), rows_)
    else:
        output.say("No aliases. Set one: llmbox alias set NAME MODEL")


@alias.command("rm")
@click.argument("name")
@pass_program
def remove(program: Program, *, name: str) -> None:
    """Remove an alias. Its model stays."""
    program.registry.remove_alias(name)
    output.say(f"{name} is no longer an alias.")


def _format_parameters(parameters: object) -> str:
    assert isinstance(parameters, dict)
    return " ".join(f"{key}={str(value)[:40]}" for key, value in parameters.items())
