"""`llmbox bench --find`: search of the operating point of a server, and its way into the configuration."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import asdict
from secrets import token_hex
from typing import Any

from ...bench.client import BenchTarget, Prompts, complete
from ...bench.measure import LoadPoint, OperatingPointSearch, PointSpec, find_operating_point, measure_point
from ...config.entries import LatencyTarget, find_target, is_entry
from ...config.loader import OVERRIDES, set_value
from ...config.settings import schema
from ...errors import CliError
from ...lifecycle.instance import find_running
from ...lifecycle.program import Program
from .. import output


def find_point(
    program: Program,
    model: str,
    url: str | None,
    key: str,
    targets: str | None,
    percentile: str,
    most: int,
    seconds: float,
    *,
    write: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Search, print what was tried, and write what was found. Raises CliError where no load is within the
    targets.
    """
    if write and url:
        raise CliError(
            "--write needs the local daemon",
            "the configuration of another server cannot be written from here",
            "llmbox bench --find --write, on that machine",
        )
    if most < 1 or seconds <= 0:
        raise CliError("--most and --time must be above 0", fix="llmbox bench --find --most 256 --time 180")
    server = BenchTarget(url or local_url(program), model, key)
    name = model if url else _served_name(program, model)
    target = _target(program, name, targets)
    spec = PointSpec(
        options["prompt"], options["output_tokens"], target, int(percentile), options["per_level"]
    )
    prompts = Prompts(token_hex(8), id_range(options["ids"]))
    result = asyncio.run(_search(server, prompts, spec, most, seconds))
    found = result.found
    if as_json:
        _print_json(server, spec, result)
    else:
        _print_table(spec, result)
    if found is None:
        raise _nothing_within(server, spec, result)
    if not as_json:
        _print_found(found, spec, result, most)
    if write and not result.is_over and found.concurrency < most:
        raise CliError(
            "nothing was written: the time ran out before the search ended",
            f"more than {found.concurrency} may be within the targets, and max_running would keep them out",
            f"--time {2 * seconds:g}, or --most {found.concurrency} where that is enough",
        )
    if write:
        _write(program, name, target, found)


async def _search(
    server: BenchTarget, prompts: Prompts, spec: PointSpec, most: int, seconds: float
) -> OperatingPointSearch:
    first = await complete(server, prompts.ids(spec.prompt), max(2, spec.output))  # pays for warm-up
    if first.error:
        raise no_success(server, first.error)

    async def measure(streams: int, left: float) -> LoadPoint:
        point = await measure_point(server, prompts, spec, streams, left, spread=first.ended - first.started)
        within = "within the targets" if point.is_within else f"missed: {', '.join(point.missed)}"
        output.say(f"{streams} {'stream' if streams == 1 else 'streams'}: {within}")
        return point

    return await find_operating_point(measure, most, seconds)


def _target(program: Program, name: str, text: str | None) -> LatencyTarget:
    """Return the target that was asked for, or the model's own."""
    entries = program.settings().settings.usage.targets if text is None else (f"*={text}",)
    if text is not None and is_entry(entries[0]) is None:
        raise CliError(
            f"--targets {text} are not two times",
            "milliseconds to the first token and per token are needed",
            "--targets 800/50",
        )
    target = find_target(entries, name)
    if target is None:
        raise CliError(
            f"{name} has no latency targets",
            "usage.targets has no entry for it",
            f"llmbox bench {name} --find --targets 800/50",
        )
    return target


def _served_name(program: Program, model: str) -> str:
    """Return the name that a model in memory is served under; the name itself where it is not there."""
    models: list[Mapping[str, Any]] = program.client.get("/admin/api/models")["models"]
    return next((str(each["name"]) for each in models if model in {each["name"], *each["aliases"]}), model)


def _print_table(spec: PointSpec, result: OperatingPointSearch) -> None:
    rank = f"P{spec.percent}"
    headers = ("STREAMS", "REQ/S", "OUT TOK/S", f"TTFT {rank}", f"TPOT {rank}", "ERRORS", "")
    rows = [
        (
            point.concurrency,
            f"{point.requests_per_s:.2f}",
            f"{point.output_tokens_per_s:.1f}",
            show_ms(point.ttft),
            show_ms(point.tpot),
            point.errors,
            "within" if point.is_within else ", ".join(_MISSED[each] for each in point.missed),
        )
        for point in sorted(result.points, key=lambda point: point.concurrency)
    ]
    output.table(headers, rows, right=range(6))


_MISSED = {
    "ttft": "TTFT missed",
    "tpot": "TPOT missed",
    "errors": "requests failed",
    "time": "not over in time",
}


def _print_found(found: LoadPoint, spec: PointSpec, result: OperatingPointSearch, most: int) -> None:
    streams = f"{found.concurrency} stream{'s' if found.concurrency > 1 else ''}"
    output.write(
        f"\n{streams}, {found.requests_per_s:.2f} requests/s, are within {_describe(spec)}: prompts of "
        f"{spec.prompt} tokens, answers of about {spec.output}."
    )
    if not result.is_over:
        why = "more were not tried (--most)" if found.concurrency == most else "the time ran out (--time)"
        output.write(f"It may be more: {why}.")


def _describe(spec: PointSpec) -> str:
    ttft, tpot = spec.target.ttft * 1000, spec.target.tpot * 1000
    return f"{ttft:g} ms to the first token and {tpot:g} ms a token for {spec.percent} % of the requests"


def _nothing_within(server: BenchTarget, spec: PointSpec, result: OperatingPointSearch) -> CliError:
    alone = next((point for point in result.points if point.concurrency == 1), None)
    what = f"no load of {server.model} is within {_describe(spec)}"
    if alone is None or alone.missed == ("time",):
        return CliError(what, "the time ran out before one stream was measured", "a longer --time")
    if "errors" in alone.missed:
        return CliError(what, alone.first_error, "llmbox logs")
    return CliError(
        what,
        f"one stream alone takes {show_ms(alone.ttft)} to the first token and {show_ms(alone.tpot)} a token "
        f"(P{spec.percent})",
        "larger targets, shorter prompts, --quant, or another machine (llmbox fit --on)",
    )


def _print_json(server: BenchTarget, spec: PointSpec, result: OperatingPointSearch) -> None:
    found = result.found
    output.write_json(
        "bench.find",
        {
            "url": server.url,
            "model": server.model,
            "targets": asdict(spec.target),
            "percentile": spec.percent,
            "prompt": spec.prompt,
            "output": spec.output,
            "points": [asdict(point) for point in result.points],
            "is_over": result.is_over,
            "found": None if found is None else asdict(found),
        },
    )


def _write(program: Program, name: str, target: LatencyTarget, found: LoadPoint) -> None:
    """Write targets, admission by them, and the streams as the model's own `max_running`, to the user's
    file.
    """
    settings = program.settings().settings
    usage, own = settings.usage, f"{name}:max_running="
    rest = [each for each in settings.model.overrides if not each.startswith(own)]
    values: dict[str, Any] = {
        "limits.admission": "slo",
        OVERRIDES: (f"{own}{found.concurrency}", *rest),
    }
    if find_target(usage.targets, name) != target:
        others = [each for each in usage.targets if not each.startswith(f"{name}=")]
        values["usage.targets"] = (f"{name}={target.ttft * 1000:g}/{target.tpot * 1000:g}", *others)
    for setting, value in values.items():
        set_value(program.paths.config_file, schema()[setting], value)
        shown = ", ".join(value) if isinstance(value, tuple) else value
        output.say(f"{setting} = {shown} in {program.paths.config_file}")
    output.say(f"max_running holds for {name} alone, from its next load on.")
    if (running := find_running(program.paths)) is not None:
        output.say(f"Apply them: kill -HUP {running.pid}, then load the model again")


def no_success(server: BenchTarget, error: str) -> CliError:
    """Error of a server that answered no request."""
    is_loading = "model_loading" in error
    fix = "llmbox ps says when it is ready" if is_loading else "check --url, --key and MODEL"
    return CliError(f"no request to {server.url} succeeded", error, fix)


def default_model(program: Program, url: str | None) -> str:
    """Return the only model in the local daemon's memory, else the built-in one."""
    models = [] if url else program.client.get("/admin/api/models")["models"]
    return str(models[0]["name"]) if len(models) == 1 else "builtin"


def local_url(program: Program) -> str:
    """URL of the local daemon, whose certificate this process then trusts."""
    running = find_running(program.paths)
    if running is not None and running.certificate:
        os.environ.setdefault("SSL_CERT_FILE", running.certificate)
    return str(program.client.get("/admin/api/status")["url"])


def id_range(text: str) -> tuple[int, int]:
    """Return the range of token ids that `--ids` names. Raises CliError."""
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise CliError(
            f"--ids {text} is not a range", "two numbers are needed, the first one smaller", "--ids 300:1500"
        )
    return int(low), int(high)


def show_ms(seconds: float | None) -> str:
    """Format a latency of a table."""
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
