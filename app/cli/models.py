"""`llmbox ps`, `llmbox ls` and `llmbox show`."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import output
from .lazy import Command
from .program import Program, pass_program
from .pull import summary

if TYPE_CHECKING:
    from ..catalog import DiskModel


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Names only.")
@pass_program
def ps(program: Program, *, as_json: bool, quiet: bool) -> None:
    """List the models in memory."""
    models = program.client.get("/admin/api/models")["models"]
    if as_json:
        output.write_json("ps", {"models": models})
    elif quiet:
        for model in models:
            output.write(model["name"])
    else:
        print_models(models)


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Names only.")
@pass_program
def ls(program: Program, *, as_json: bool, quiet: bool) -> None:
    """List the models on disk: built-in, in the Hugging Face cache, adopted, loaded, on their way."""
    from ..catalog import describe, in_memory, on_disk

    loaded = _loaded(program)
    names = program.names
    found = on_disk(program.environ, names)
    coming = _downloads(program)
    known = {str(model.ref.path) for model in found}
    others = {path: name for path, name in loaded.items() if path not in known}
    found += [describe(in_memory(name, Path(path))) for path, name in others.items()]
    aliases = {
        model.ref.name: sorted(
            name for name, each in names.aliases.items() if model.ref.is_target(each.model)
        )
        for model in found
    }
    if as_json:
        rows = [
            {
                "name": model.ref.name,
                "source": model.ref.source,
                "path": str(model.ref.path),
                "revision": model.ref.revision,
                "size": model.size,
                "architecture": model.architecture,
                "servable": model.servable,
                "loaded": str(model.ref.path) in loaded,
                "aliases": aliases.get(model.ref.name, []),
            }
            for model in found
        ]
        output.write_json("ls", {"models": rows, "downloads": coming})
    elif quiet:
        for model in found:
            output.write(model.ref.name)
    else:
        table = [
            (
                model.ref.name,
                output.size(model.size),
                model.architecture or "-",
                _state(model, loaded=str(model.ref.path) in loaded),
                time.strftime("%Y-%m-%d", time.localtime(model.modified)) if model.modified else "-",
                ", ".join(aliases.get(model.ref.name, [])),
            )
            for model in found
        ]
        table += [
            (row["model"], output.size(row["total"] or None), "-", _coming(row), "", "") for row in coming
        ]
        output.table(("NAME", "SIZE", "ARCHITECTURE", "STATE", "MODIFIED", "ALIASES"), table, right=(1,))


def _coming(row: Mapping[str, Any]) -> str:
    """In a few words; `pull --list` has the whole reason."""
    return f"failed: {row['error']['what']}" if row["state"] == "failed" else summary(row)


def _state(model: "DiskModel", *, loaded: bool) -> str:
    state = "loaded" if loaded else ""
    if not model.ref.path.is_dir():
        return "loaded, its files are gone" if loaded else "its files are gone"
    return state if state or model.servable else "no safetensors"


@click.command(cls=Command)
@click.argument("ref")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def show(program: Program, ref: str, *, as_json: bool) -> None:
    """Show what is known of one model, on disk and in memory."""
    from ..catalog import describe, read_config

    place = program.resolve(ref)
    memory = _in_memory(program, place.name)
    disk = describe(place)
    config = read_config(place.path)
    facts: dict[str, Any] = {
        "name": place.name,
        "path": str(place.path),
        "revision": place.revision,
        "size": disk.size,
        "architecture": disk.architecture,
        "servable": disk.servable,
        "aliases": [name for name, each in program.names.aliases.items() if place.is_target(each.model)]
        or None,
        **{key: config.get(name) for key, name in _CONFIG_FACTS.items()},
        "loaded": memory,
        "loads": _loads(program, place.name),
    }
    if as_json:
        output.write_json("show", facts)
        return
    shown = {**facts, "size": output.size(disk.size), "loaded": memory["state"] if memory else "no"}
    shown["loads"] = _last_load(facts["loads"])
    for key, value in shown.items():
        if value is not None:
            output.write(f"{key.replace('_', ' '):16} {output.printable(str(value))}")
    if memory and memory["info"]:
        _print_info(memory)


_CONFIG_FACTS = {
    "model_type": "model_type",
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "stored_as": "torch_dtype",
}


def print_models(models: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for model in models:
        info, stats = model["info"], model["stats"]
        memory = info["weights_bytes"] + info["kv_bytes"] + info["workspace_bytes"] if info else None
        rows.append(
            (
                ", ".join([model["name"], *model["aliases"]]),
                model["state"],
                runs_on(info) if info else "-",
                info["context_window"] if info else "-",
                output.size(memory),
                output.size(info["kv_bytes"]) if info else "-",
                f"{stats['running']}+{stats['waiting']}" if stats else "-",
                _stay(model),
                model["cause"] if model["state"] in {"loading", "failed", "restarting"} else "",
            )
        )
    if rows:
        headers = ("NAME", "STATE", "ON", "CONTEXT", "MEMORY", "OF IT KV", "REQUESTS", "STAYS", "")
        output.table(headers, rows, right=(3, 4, 5))
    else:
        output.say("No model is loaded. Load one: llmbox load MODEL")


def _loads(program: Program, name: str) -> list[dict[str, Any]]:
    """Of this model, oldest first: as the daemon noted them."""
    import json

    try:
        rows = json.loads(program.paths.loads_file.read_bytes())["models"].get(name, [])
        return [dict(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _last_load(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Predicted against measured."""
    if not rows:
        return None
    row = rows[-1]
    predicted, measured = row["predicted_weights"], row["measured_weights"]
    text = f"{output.clock(row['at'])} on {row['device']} as {row['dtype']} in {output.span(row['seconds'])}"
    text += f"; weights predicted {output.size(predicted)}"
    if measured:
        text += f", measured {output.size(measured)} ({measured / predicted - 1:+.1%})"
    return text


def _stay(model: Mapping[str, Any]) -> str:
    """How long it stays in memory."""
    if model.get("pinned"):
        return "pinned"
    if model.get("ttl_s") is None:
        return ""
    left = model.get("expires_s")
    return f"idle {output.span(model['ttl_s'])}" if left is None else output.span(left)


def runs_on(info: Mapping[str, Any]) -> str:
    weights = info["dtype"] if info["quant"] == "none" else info["quant"]
    ranks = info["tp"] * info["pp"]
    return f"{info['device']} {weights}" + (
        f" on {ranks} ranks (tp {info['tp']}, pp {info['pp']})" if ranks > 1 else ""
    )


def _print_info(model: Mapping[str, Any]) -> None:
    info = model["info"]
    output.write("")
    rows = {
        "runs on": f"{runs_on(info)}, kernels: {info['backend']}",
        **({"because": "; ".join(info["notes"])} if info["notes"] else {}),
        "context window": f"{info['context_window']} tokens",
        "at full context": f"{info['max_concurrency']:.1f} requests at once",
        "weights": output.size(info["weights_bytes"]),
        "KV cache": f"{output.size(info['kv_bytes'])}, {output.size(info['kv_bytes_per_token'])} a token",
        "workspace": output.size(info["workspace_bytes"]),
        "restarts": f"{model['restarts']}, requests resumed {model['resumed']}",
    }
    for key, value in rows.items():
        output.write(f"{key:16} {value}")


def _loaded(program: Program) -> dict[str, str]:
    """Path to name of models in memory; empty when no daemon runs. Failed loads have no path."""
    if not program.client.is_up():
        return {}
    models = program.client.get("/admin/api/models")["models"]
    return {model["path"]: model["name"] for model in models if model["path"]}


def _downloads(program: Program) -> list[dict[str, Any]]:
    """Those that are not finished; empty when no daemon runs."""
    if not program.client.is_up():
        return []
    rows: list[dict[str, Any]] = program.client.get("/admin/api/downloads")["downloads"]
    return [row for row in rows if row["state"] not in {"ready", "cancelled"}]


def _in_memory(program: Program, name: str) -> dict[str, Any] | None:
    if not program.client.is_up():
        return None
    models: list[dict[str, Any]] = program.client.get("/admin/api/models")["models"]
    return next((model for model in models if name in {model["name"], *model["aliases"]}), None)
