"""`llmbox search`, `adopt`, `rm` and `df`: models on the hub and on this disk."""

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import CliError, Exit
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...util import formatting
from .. import output
from ..output import require_consent

if TYPE_CHECKING:
    from llmbox.engine.weights.packed_cache.cache import PackedCacheEntry, PackedWeightCache


@click.command(cls=Command)
@click.argument("text", required=False)
@click.option(
    "--limit", metavar="N", type=click.IntRange(1, 50), default=15, show_default=True, help="Result limit."
)
@click.option(
    "--refresh", is_flag=True, help="Without TEXT: ask the hub for sizes and licenses of these models first."
)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@pass_program
def search(
    program: Program, *, text: str | None, limit: int, refresh: bool, as_json: bool, quiet: bool
) -> None:
    """Search the hub for models and show whether they fit this machine.

    Without TEXT, show recommended models by purpose, from a list that comes with llmbox; the hub is then
    contacted only with --refresh.
    """
    if text is None:
        if refresh:
            _refresh_recommended(program)
        _list_recommended(program, as_json=as_json, quiet=quiet)
        return
    from ...hub.errors import HubError
    from ...hub.model_info import search as search_hub
    from ...hub.repo_files import Hub
    from .fit import planner

    progress = output.ProgressLine()
    progress.update(f"Asking {os.environ.get('HF_ENDPOINT') or 'the hub'}…")
    try:
        hits = search_hub(
            Hub.of_environment(lambda text: output.say(f"  {text}")), text, limit, planner(program).plan
        )
    except HubError as error:
        raise as_cli(error) from error
    finally:
        progress.close()
    if as_json:
        output.write_json("search", {"models": [asdict(hit) for hit in hits]})
    elif quiet:
        for hit in hits:
            output.write(hit.name)
    elif not hits:
        output.say(f"No model with safetensors weights matches {text!r}.")
    else:
        rows = [
            (
                hit.name,
                _count(hit.params),
                hit.fits + (", gated" if hit.gated else ""),
                hit.context or "-",
                formatting.size(hit.memory),
                hit.downloads,
                hit.detail.partition(";")[0][:60],
            )
            for hit in hits
        ]
        output.table(
            ("NAME", "PARAMS", "FITS", "CONTEXT", "MEMORY", "DOWNLOADS", ""), rows, right=(1, 3, 4, 5)
        )


def _refresh_recommended(program: Program) -> None:
    from ...hub.errors import HubError
    from ...hub.model_info import ask_recommended
    from ...hub.repo_files import Hub
    from ...models.registry import keep_hub_facts

    progress = output.ProgressLine()
    progress.update(f"Asking {os.environ.get('HF_ENDPOINT') or 'the hub'}…")
    try:
        found, failed = ask_recommended(Hub.of_environment(lambda text: output.say(f"  {text}")))
        keep_hub_facts(program.paths.recommended_file, found)
    except HubError as error:
        raise as_cli(error) from error
    except OSError as error:
        file = program.paths.recommended_file
        raise CliError(f"cannot write {file}", error.strerror or str(error), "free some space") from error
    finally:
        progress.close()
    output.say(f"{len(found)} of {len(found) + len(failed)} models refreshed.")
    for repo, problem in failed.items():
        output.say(f"  {repo}: as the package has it ({problem.why or problem.what})")


def _list_recommended(program: Program, *, as_json: bool, quiet: bool) -> None:
    from ...fit.recommendations import begin_with, first_choices
    from .fit import recommendations

    found = recommendations(program)
    if as_json:
        output.write_json("recommended", {"models": [each.as_dict() for each in found]})
        return
    if quiet:
        for each in found:
            output.write(each.model.name)
        return
    rows = []
    for each in found:
        model, plan, speed = each.model, each.fit.plan, each.fit.speed
        rows.append(
            (
                model.name + (" *" if model.default else ""),
                model.purpose + (", vision" if model.reads_images and model.purpose != "vision" else ""),
                _count(model.params),
                ("yes" if each.fit.fits else each.fitting_quant or "no") + (", here" if each.here else ""),
                plan.context if plan else "-",
                formatting.size(plan.total_bytes if plan else None),
                formatting.rate_range(*speed.one_stream) if speed else "-",
                formatting.size(each.fit.disk_need or None),
                model.license + (", gated" if model.gated else ""),
            )
        )
    heads = ("NAME", "FOR", "PARAMS", "FITS", "CONTEXT", "MEMORY", "TOK/S", "FETCH", "LICENSE")
    output.table(heads, rows, right=(2, 4, 5, 6, 7))
    output.say("* marks the size that a name without a tag means. All other models: llmbox search TEXT")
    if any(each.fitting_quant for each in found):
        output.say("int8 and int4 under FITS: the model fits with --quant int8 or --quant int4.")
    if choices := first_choices(found):
        named = ", ".join(f"{label.lower()} {each.model.name}" for label, each in choices.items())
        output.say(f"For chat on this machine: {named}. Begin: llmbox run {begin_with(choices).model.name}")


@click.command(cls=Command)
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--name", help="Name to serve a single folder under; default: the folder's name.")
@json_option
@pass_program
def adopt(program: Program, *, paths: tuple[Path, ...], name: str | None, as_json: bool) -> None:
    """Use models where they are, without copying them.

    A PATH is another Hugging Face cache, a model's folder, or a folder of such folders (as LM Studio keeps
    them).
    """
    from ...hub.local_models import find_adoptable
    from ...models.catalog import check_name

    if name is not None and len(paths) != 1:
        raise CliError("--name is for one folder", f"{len(paths)} are given", "give one PATH", Exit.USAGE)
    found = [each for path in paths for each in find_adoptable(path, program.names.gguf_home)]
    if name is not None:
        if len(found) != 1 or found[0].is_cache:
            raise CliError(
                "--name names one folder", f"{paths[0]} holds several models", "leave it out", Exit.USAGE
            )
        found = [type(found[0])(check_name(name, "choose another"), found[0].path, is_cache=False)]
    for each in found:
        if each.is_cache:
            program.registry.adopt_cache(each.path)
        else:
            program.registry.adopt_directory(
                check_name(each.name, f"llmbox adopt {shlex.quote(str(each.path))} --name NAME"), each.path
            )
    if as_json:
        rows = [{"name": each.name, "path": str(each.path), "cache": each.is_cache} for each in found]
        output.write_json("adopt", {"adopted": rows})
        return
    for each in found:
        output.say(f"{each.name}: {each.path}" + (" (a cache)" if each.is_cache else ""))
    output.say("See them: llmbox ls")


@click.command(cls=Command)
@click.argument("refs", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; needs --yes.")
@pass_program
def rm(program: Program, *, refs: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Delete models from this disk; org/name@revision deletes that revision only.

    An adopted folder only leaves the list; its files stay. Models that are loaded or being downloaded are not
    deleted.
    """
    if not yes:
        require_consent(_what_goes(program, refs), "nothing was deleted", yes=False, as_json=as_json)
    if program.client.is_up():
        answer = program.client.post("/admin/api/models/delete", {"models": refs}, timeout=600.0)
        removed: list[dict[str, Any]] = answer["removed"]
    else:
        from ...control.kv_cache import prune_kv_cache
        from ...hub.local_models import find_removable, remove

        found = [find_removable(ref, program.environ, program.names) for ref in refs]
        removed = [asdict(remove(each, program.registry)) for each in found]
        packed_weights(program).prune()
        prune_kv_cache(program.paths, program.settings().settings.cache)
    if as_json:
        output.write_json("rm", {"removed": removed, "freed": sum(each["freed"] for each in removed)})
        return
    for each in removed:
        if each["forgotten"]:
            output.say(f"{each['name']} is forgotten; its files stay where they are.")
        else:
            output.say(f"{each['name']} is deleted: {formatting.size(each['freed'])} freed.")


def _what_goes(program: Program, refs: Sequence[str]) -> str:
    """Build the question, with the bytes that are freed. Raises CliError for a model that is not there."""
    from ...hub.local_models import find_removable

    parts = []
    for ref in dict.fromkeys(refs):
        found = find_removable(ref, program.environ, program.names)
        if found.repo is None:
            parts.append(f"forget {found.name} (its files stay in {found.folder})")
        elif found.commit is not None:
            parts.append(f"delete {found.name}, with the files that no other revision uses")
        else:
            parts.append(f"delete {found.name} ({formatting.size(found.size)})")
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}?"


@click.command(cls=Command)
@click.option(
    "--prune", is_flag=True, help="Delete packed weights and KV cache of models that are gone or changed."
)
@click.option(
    "--prune-all",
    is_flag=True,
    help="Delete all packed weights and KV cache; later loads pack again, prompts are computed again.",
)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@pass_program
def df(program: Program, *, prune: bool, prune_all: bool, as_json: bool, quiet: bool) -> None:
    """Show the disk space taken by models, unfinished downloads, packed weights and the KV cache."""
    from ...control.kv_cache import prune_kv_cache

    packed = packed_weights(program)
    freed = None
    if prune or prune_all:
        cache_settings = program.settings().settings.cache
        freed = packed.prune(everything=prune_all)
        freed += prune_kv_cache(program.paths, cache_settings, everything=prune_all)
    report = {**disk_report(program, packed), "freed": freed}
    if as_json:
        output.write_json("df", report)
    elif quiet:
        for row in report["models"]:
            output.write(row["name"])
    else:
        print_disk_report(report)


def disk_report(program: Program, packed: "PackedWeightCache") -> dict[str, Any]:
    """Return the bytes that models, caches and files of the daemon take, as `df --json` shows them."""
    from ...hub.local_models import disk_use, folder_size
    from ...hub.transfer import free_space
    from ...models.catalog import hub_cache

    repacked = [repacked_row(entry) for entry in packed.entries()]
    kv_cache = kv_cache_rows(program)
    taken = disk_use(program.environ, program.names)
    cache = hub_cache(program.environ)
    own = {
        "state": folder_size(program.paths.state_dir),
        "cache": folder_size(program.paths.cache_dir),
    }
    return {
        "models": [{**asdict(each), "path": str(each.path)} for each in taken],
        "total": sum(each.size + each.partial for each in taken),
        "free": free_space(cache),
        "models_folder": str(cache),
        "own": own,
        "repacked": repacked,
        "kv_cache": kv_cache,
    }


def print_disk_report(report: Mapping[str, Any]) -> None:
    size = formatting.size
    _print_models_on_disk(report["models"])
    if report["repacked"]:
        output.write("")
        output.table(
            ("PACKED WEIGHTS OF", "FORMAT", "SIZE", "LAST USED", ""),
            [
                (
                    *_model_and_format(row),
                    size(row["size"]),
                    formatting.clock(row["last_used"]),
                    "of no use" if row["useless"] else "",
                )
                for row in report["repacked"]
            ],
            right=(2,),
        )
    if report["kv_cache"]:
        output.write("")
        rows = [
            (*_model_and_format(row), row["blocks"], size(row["size"]), formatting.clock(row["last_used"]))
            for row in report["kv_cache"]
        ]
        output.table(("KV CACHE OF", "FORMAT", "BLOCKS", "SIZE", "LAST USED"), rows, right=(2, 3))
    output.write("")
    if report["freed"] is not None:
        output.write(f"{size(report['freed'])} of packed weights and KV cache deleted")
    folder = report["models_folder"]
    output.write(f"{size(report['total'])} in models, {size(report['free'])} free on the disk of {folder}")
    own = report["own"]
    output.write(f"{size(own['state'])} of logs and state, {size(own['cache'])} of files safe to delete")


def _print_models_on_disk(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        output.write("No models were downloaded or adopted.")
        return
    cells = [
        (
            row["name"],
            row["source"],
            formatting.size(row["size"]),
            formatting.size(row["partial"]) if row["partial"] else "-",
            row["revisions"],
        )
        for row in rows
    ]
    output.table(("NAME", "SOURCE", "SIZE", "UNFINISHED", "REVISIONS"), cells, right=(2, 3, 4))


def _model_and_format(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["model"] or "?", row["format"] or "?"


def packed_weights(program: Program) -> "PackedWeightCache":
    from llmbox.engine.weights.packed_cache.cache import PackedWeightCache

    gigabytes = program.settings().settings.cache.repacked_gb
    return PackedWeightCache(program.paths.repacked, int(gigabytes * 1e9))


def kv_cache_rows(program: Program) -> list[dict[str, Any]]:
    """List what the KV cache on disk takes; nothing where there is none, or it cannot be used."""
    from llmbox.engine.kv_store.folder import KVFolderUnusable

    from ...control.kv_cache import open_kv_cache

    with contextlib.suppress(KVFolderUnusable, OSError):
        folder = open_kv_cache(program.paths, program.settings().settings.cache)
        return [
            {
                "model": usage.about.get("model"),
                "format": usage.about.get("format"),
                "blocks": usage.blocks,
                "size": usage.size,
                "last_used": usage.used,
            }
            for usage in ([] if folder is None else folder.models())
            if usage.blocks
        ]
    return []


def repacked_row(entry: "PackedCacheEntry") -> dict[str, Any]:
    index = entry.index
    return {
        "model": None if index is None else index.model,
        "format": None if index is None else index.format,
        "size": entry.size,
        "last_used": entry.last_used,
        "useless": entry.useless,
        "path": str(entry.path),
    }


def as_cli(error: Any) -> CliError:
    """Convert a HubError."""
    return CliError(error.what, error.why, error.fix, error.exit)


def _count(params: int | None) -> str:
    if params is None:
        return "-"
    return f"{params / 1e9:.1f}B" if params >= 999.5e6 else f"{params / 1e6:.0f}M"
