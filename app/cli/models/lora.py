"""`llmbox lora` and `llmbox alias`: adapters and names over a model that is loaded once."""

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from ...errors import CliError, Exit
from ...lifecycle.program import Command, Program, pass_program
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
from ...util import formatting
from .. import output
from ..root import CommandGroup
from .convert import run_job


@click.group(cls=CommandGroup)
def lora() -> None:
    """LoRA adapters of models."""


@lora.command("add", cls=Command)
@click.argument("name")
@click.argument("source", metavar="DIR|REPO")
@click.option("--base", metavar="MODEL", help="Model that it was trained on; default is the one it names.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
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


@lora.command("list", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Names only.")
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


@lora.command("rm", cls=Command)
@click.argument("name")
@pass_program
def rm(program: Program, *, name: str) -> None:
    """Remove an adapter and its copied files. Its base and the folder it was added from stay."""
    remove_adapter(program.registry, name)
    output.say(f"{name} is no longer an adapter.")


@lora.command("merge", cls=Command)
@click.argument("adapter", metavar="NAME")
@click.option("--base", metavar="MODEL", help="Model to merge into, of an adapter that was not added.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to make.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def merge(program: Program, *, adapter: str, base: str | None, out: Path, as_json: bool) -> None:
    """Merge an adapter into its base: a model folder that transformers and vLLM load too.

    NAME is an adapter, or a folder of one that was not added, such as DoRA, which cannot be applied beside a
    model. The base is a checkpoint in 16 or 32 bits.
    """
    folder, known = find_adapter(program.registry, adapter)
    from llmbox.engine.checkpoint.adapter import read_adapter
    from llmbox.engine.errors import ModelError

    try:
        parsed = read_adapter(folder)
    except ModelError as error:
        raise CliError("not merged", str(error), "docs/adapters.md has what is read", Exit.FAILED) from None
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
    """Names and parameter variants of models."""


@alias.command("set", cls=Command)
@click.argument("name")
@click.argument("ref")
@click.argument("parameters", nargs=-1, metavar="[K=V]...")
@pass_program
def set_(program: Program, *, name: str, ref: str, parameters: tuple[str, ...]) -> None:
    """Make NAME an alias of the model REF.

    Parameters apply where a request does not set them: temperature, top_p, top_k, min_p, repetition_penalty,
    and system, a system prompt. ctx bounds the context. All aliases of a model share one load.
    """
    found = set_alias(
        program.registry, program.environ, name, ref, parameters, program.in_memory()
    ).parameters
    output.say(f"{name} is {ref}" + (f" with {_format_parameters(found)}" if found else "") + ".")


@alias.command("ls", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Names only.")
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


@alias.command("rm", cls=Command)
@click.argument("name")
@pass_program
def remove(program: Program, *, name: str) -> None:
    """Remove an alias. Its model stays."""
    program.registry.remove_alias(name)
    output.say(f"{name} is no longer an alias.")


def _format_parameters(parameters: object) -> str:
    assert isinstance(parameters, dict)
    return " ".join(f"{key}={str(value)[:40]}" for key, value in parameters.items())
