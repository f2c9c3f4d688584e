"""`llmbox ps`, `ls` and `show`."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...lifecycle.program import Command, Program, json_option, pass_program
from ...util import formatting
from .. import output
from ..options import mmproj_option
from .pull import summary

if TYPE_CHECKING:
    from ...models.catalog import DiskModel


@click.command(cls=Command)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
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
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print names only.")
@pass_program
def ls(program: Program, *, as_json: bool, quiet: bool) -> None:
    """List the models on disk: built-in, in the Hugging Face cache, adopted, loaded, being downloaded."""
    from ...models.catalog import describe, in_memory, on_disk

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
                formatting.size(model.size),
                model.architecture or "-",
                _state(model, loaded=str(model.ref.path) in loaded),
                time.strftime("%Y-%m-%d", time.localtime(model.modified)) if model.modified else "-",
                ", ".join(aliases.get(model.ref.name, [])),
            )
            for model in found
        ]
        table += [
            (row["model"], formatting.size(row["total"] or None), "-", _coming(row), "", "") for row in coming
        ]
        output.table(("NAME", "SIZE", "ARCHITECTURE", "STATE", "MODIFIED", "ALIASES"), table, right=(1,))


def _coming(row: Mapping[str, Any]) -> str:
    """Format a download's state in a few words; `pull --list` has the whole reason."""
    return f"failed: {row['error']['what']}" if row["state"] == "failed" else summary(row)


def _state(model: "DiskModel", *, loaded: bool) -> str:
    state = "loaded" if loaded else ""
    if not model.ref.path.is_dir():
        return "loaded, its files are gone" if loaded else "its files are gone"
    return state if state or model.servable else "no safetensors"


@click.command(cls=Command)
@click.argument("ref")
@mmproj_option
@json_option
@pass_program
def show(program: Program, ref: str, mmproj: str | None, *, as_json: bool) -> None:
    """Show the details of one model, on disk and in memory."""
    from ...models.catalog import describe, read_config

    place = program.resolve(program.with_projector(ref, mmproj))
    memory = _in_memory(program, place.name)
    disk = describe(place)
    config = read_config(place.path)
    others = {name: each for name, each in program.names.aliases.items() if place.is_target(each.model)}
    facts: dict[str, Any] = {
        "name": place.name,
        "path": str(place.path),
        "revision": place.revision,
        "size": disk.size,
        "architecture": disk.architecture,
        "servable": disk.servable,
        "aliases": [name for name, each in others.items() if not each.adapter] or None,
        "adapters": [name for name, each in others.items() if each.adapter] or None,
        **{key: config.get(name) for key, name in _CONFIG_FACTS.items()},
        **_output_format(place.path),
        "images": _describe_images(place.path),
        "loaded": memory,
        "loads": _loads(program, place.name),
    }
    if as_json:
        output.write_json("show", facts)
        return
    shown = {**facts, "size": formatting.size(disk.size), "loaded": memory["state"] if memory else "no"}
    shown["loads"] = _last_load(facts["loads"])
    if facts["adapters"]:
        here = memory.get("adapters", ()) if memory else ()  # a daemon that is older has none
        shown["adapters"] = ", ".join(
            f"{name} (in memory)" if name in here else name for name in facts["adapters"]
        )
    for key, value in shown.items():
        if value is not None:
            text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
            output.write(f"{key.replace('_', ' '):16} {formatting.printable(text)}")
    if memory and memory["info"]:
        _print_info(memory)


def _output_format(folder: Path) -> dict[str, str | None]:
    """Describe how the model writes tool calls and thoughts, by its chat template."""
    from llmbox.engine.errors import EngineError

    from ...text.output.format_table import recognize_format
    from ...text.tokenizer.text_loader import read_template

    try:
        format_ = recognize_format(read_template(folder))
    except (EngineError, OSError):
        return {"tool_calls": None, "thoughts": None}
    calls = f"{format_.name} ({format_.families})" if format_.tools else None
    marks = format_.reasoning
    thoughts = f"{marks.opener.strip()} … {marks.closer}" if marks else None
    return {"tool_calls": calls, "thoughts": thoughts}


def _describe_images(folder: Path) -> str | None:
    """Describe what an image costs, or why none is read; None for a model of texts."""
    from llmbox.engine.errors import EngineError
    from llmbox.engine.model_config.vision.config import NO_TOWER, USUAL_SIDE
    from llmbox.engine.model_config.vision.families import find_vision, vision_shape

    try:
        vision, problem = find_vision(folder)
    except (EngineError, OSError):
        return None
    if vision is None:
        return None if problem == NO_TOWER else f"not read: {problem}"
    return f"{vision_shape(vision).usual_rows:,} tokens for one of {USUAL_SIDE} x {USUAL_SIDE}"


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
                formatting.runs_on(info) if info else "-",
                info["context_window"] if info else "-",
                formatting.size(memory),
                formatting.size(info["kv_bytes"]) if info else "-",
                f"{stats['running']}+{stats['waiting']}" if stats else "-",
                _stay(model),
                model["cause"] if model["state"] in {"loading", "failed", "restarting"} else _note(model),
            )
        )
    if rows:
        headers = ("NAME", "STATE", "ON", "CONTEXT", "MEMORY", "OF IT KV", "REQUESTS", "STAYS", "")
        output.table(headers, rows, right=(3, 4, 5))
    else:
        output.say("No model is loaded. Load one: llmbox load MODEL")


def _loads(program: Program, name: str) -> list[dict[str, Any]]:
    """Return the recorded loads of this model, oldest first."""
    import json

    try:
        rows = json.loads(program.paths.loads_file.read_bytes())["models"].get(name, [])
        return [dict(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _last_load(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Format the last load: predicted and measured size."""
    if not rows:
        return None
    row = rows[-1]
    predicted, measured = row["predicted_weights"], row["measured_weights"]
    text = f"{formatting.clock(row['at'])} on {row['device']} as {row['dtype']}"
    text += f" in {formatting.span(row['seconds'])}"
    text += f"; weights predicted {formatting.size(predicted)}"
    if measured:
        text += f", measured {formatting.size(measured)} ({measured / predicted - 1:+.1%})"
    return text


def _note(model: Mapping[str, Any]) -> str:
    """Name what a model makes that makes no text, targets that it cannot meet, and why slower kernels run;
    empty for others.
    """
    info, queue = model["info"], model.get("queue")
    problem = f"slower kernels run: {info['kernels_problem']}" if info and info.get("kernels_problem") else ""
    return "; ".join(filter(None, (_makes(info), queue["problem"] if queue else "", problem)))


def _makes(info: Mapping[str, Any] | None) -> str:
    """Name what a model makes that makes no text, and where; empty for others."""
    if info is None or info["generates"]:
        return ""
    if info["num_labels"]:
        return "scores: /v1/rerank" if info["num_labels"] == 1 else "classes: /classify"
    return f"embeddings of {info['hidden_size']} numbers: /v1/embeddings"


def _stay(model: Mapping[str, Any]) -> str:
    """Format the time that a model stays in memory."""
    if model.get("pinned"):
        return "pinned"
    if model.get("ttl_s") is None:
        return ""
    left = model.get("expires_s")
    return f"idle {formatting.span(model['ttl_s'])}" if left is None else formatting.span(left)


def _print_info(model: Mapping[str, Any]) -> None:
    info = model["info"]
    output.write("")
    rows = {
        "runs on": f"{formatting.runs_on(info)}, kernels: {info['backend']}",
        **({"notes": "; ".join(info["notes"])} if info["notes"] else {}),
        **({"makes": made} if (made := _makes(info)) else {}),
        "context window": f"{info['context_window']} tokens",
        "at full context": f"{round(info['max_concurrency'], 1):g} requests at once",
        "weights": formatting.size(info["weights_bytes"]),
        **(
            {"experts": f"{formatting.size(info['expert_bytes'])} of main memory"}
            if info.get("expert_bytes")
            else {}
        ),
        "KV cache": (
            f"{formatting.size(info['kv_bytes'])}, {formatting.size(info['kv_bytes_per_token'])} a token"
            if info["kv_bytes"]
            else formatting.no_kv_cache(has_state=info["generates"])
        ),
        "workspace": formatting.size(info["workspace_bytes"]),
        "restarts": f"{model['restarts']}, requests resumed {model['resumed']}",
        **_latency(model.get("queue")),
    }
    for key, value in rows.items():
        output.write(f"{key:16} {value}")


def _latency(queue: Mapping[str, Any] | None) -> dict[str, str]:
    """Describe what the measured model of the queue says, and what became of requests by it."""
    if queue is None:
        return {}
    first, each = formatting.span(queue["ttft"]), formatting.span(queue["tpot"])
    rows = {"a request now": f"first token after {first}, a token every {each}"}
    if queue["admitted"] or queue["refused"]:
        rows["by targets"] = (
            f"{queue['admitted']} admitted, {queue['missed']} of them late; {queue['refused']} refused"
        )
    if queue["problem"]:
        rows["targets"] = queue["problem"]
    if queue["prompt_ratio"] is not None:
        rows["prompts"] = (
            f"steps with a prompt in them take {queue['prompt_ratio']:.1f} times as long "
            f"({queue['prompt_share']:.1%} of the steps)"
        )
    if queue["disaggregate"]:
        rows["prompts"] += f"; --disaggregate {queue['disaggregate']} keeps them apart"
    if queue["engines"]:
        rows["engines"] = queue["engines"]
    return rows


def _loaded(program: Program) -> dict[str, str]:
    """Return the models in memory, path to name; empty when no daemon runs. Failed loads have no path."""
    if not program.client.is_up():
        return {}
    models = program.client.get("/admin/api/models")["models"]
    return {model["path"]: model["name"] for model in models if model["path"]}


def _downloads(program: Program) -> list[dict[str, Any]]:
    """Return the unfinished downloads; empty when no daemon runs."""
    if not program.client.is_up():
        return []
    rows: list[dict[str, Any]] = program.client.get("/admin/api/downloads")["downloads"]
    return [row for row in rows if row["state"] not in {"ready", "cancelled"}]


def _in_memory(program: Program, name: str) -> dict[str, Any] | None:
    if not program.client.is_up():
        return None
    models: list[dict[str, Any]] = program.client.get("/admin/api/models")["models"]
    return next((model for model in models if name in {model["name"], *model["aliases"]}), None)
