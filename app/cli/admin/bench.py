"""`llmbox bench`: a load test of any OpenAI-compatible server, its operating point, and comparisons of llmbox
with itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from secrets import token_hex
from typing import Any

import click

from ...bench.ab_compare import SCALES, SCENARIOS
from ...bench.client import BenchTarget, Prompts, Workload, uniform
from ...bench.measure import (
    BenchRun,
    Levels,
    Summary,
    bench_folder,
    keep_run,
    ratios,
    read_levels,
    run,
    summarise,
)
from ...bench.profile import LevelProfile, profiled
from ...errors import CliError
from ...lifecycle.program import Command, Program, json_option, pass_program
from .. import output
from .bench_find import default_model, find_point, id_range, local_url, no_success, show_ms

COUNT = click.IntRange(1)


class StreamCounts(click.ParamType[list[int]]):
    """Numbers of streams, separated by commas."""

    name = "numbers"

    def convert(
        self, value: Any, parameter: click.Parameter | None, context: click.Context | None
    ) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            return [COUNT.convert(each.strip(), parameter, context) for each in value.split(",")]
        except click.BadParameter:
            self.fail(f"{value!r} is not a list of numbers above 0, such as 1,4,16.", parameter, context)


@click.command(cls=Command)
@click.argument("model", required=False)
@click.option("--url", metavar="URL", help="Another server, as http://host:port; default: the local daemon.")
@click.option("--key", metavar="KEY", envvar="LLMBOX_BENCH_KEY", default="", help="API key for --url.")
@click.option(
    "--concurrency",
    "levels",
    type=StreamCounts(),
    metavar="N,N",
    default="1,4,16",
    show_default=True,
    help="Numbers of concurrent requests to measure, separated by commas.",
)
@click.option(
    "--requests",
    "per_level",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    help="Requests per concurrency level; default: 4 for each stream, at least 8.",
)
@click.option("--prompt", type=COUNT, metavar="N", default=128, show_default=True, help="Prompt tokens.")
@click.option(
    "--output",
    "output_tokens",
    type=COUNT,
    metavar="N",
    default=128,
    show_default=True,
    help="Output tokens.",
)
@click.option(
    "--scenario",
    type=click.Choice(["load", *SCENARIOS, "all"]),
    default="load",
    show_default=True,
    help="What to measure: a load, or a comparison of two settings.",
)
@click.option("--scale", type=click.Choice(list(SCALES)), default="full", help="Workload size of a scenario.")
@click.option(
    "--rounds",
    type=COUNT,
    metavar="N",
    default=5,
    show_default=True,
    help="Rounds of a scenario, interleaved.",
)
@click.option(
    "--ids",
    metavar="FIRST:LAST",
    default="300:1500",
    show_default=True,
    help="Range of token ids for prompts.",
)
@click.option(
    "--compare",
    "earlier",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the --json output of an earlier run, to show the ratio to it.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="Show where the time of the engine's steps goes, for each concurrency level.",
)
@click.option(
    "--find", is_flag=True, help="Find the largest number of streams whose latencies stay within the targets."
)
@click.option(
    "--targets",
    metavar="TTFT/TPOT",
    help="Targets of --find in milliseconds, as 800/50; default is the model's entry in usage.targets.",
)
@click.option(
    "--percentile",
    type=click.Choice(["90", "95", "99"]),
    default="95",
    show_default=True,
    help="Percentile of requests that must be within the targets of --find.",
)
@click.option(
    "--most", metavar="N", default=256, show_default=True, help="Maximum number of streams that --find tries."
)
@click.option(
    "--time",
    "seconds",
    metavar="S",
    default=180.0,
    show_default=True,
    help="Maximum time of --find, in seconds.",
)
@click.option("--write", is_flag=True, help="Write the result of --find to the configuration.")
@json_option
@pass_program
def bench(program: Program, /, scenario: str, earlier: Path | None, *, find: bool, **options: Any) -> None:
    """Measure MODEL on a server: time to first token, time per token, throughput.

    Without MODEL, measure the loaded model if there is just one, otherwise the built-in model.

    Scenarios other than `load` compare two settings of the local daemon: it loads MODEL once for each side,
    alternates between them round by round, and reports the ratio with its spread.
    """
    options["model"] = options["model"] or default_model(program, options["url"])
    searching = {name: options.pop(name) for name in ("targets", "percentile", "most", "seconds", "write")}
    if find:
        if scenario != "load" or earlier or options["profile"]:
            raise click.UsageError(
                "--find searches by itself: it excludes --scenario, --compare and --profile"
            )
        find_point(program, **options, **searching)
    elif searching["targets"] or searching["write"]:
        raise click.UsageError("--targets and --write need --find")
    elif scenario == "load":
        _load(program, before=read_levels(earlier) if earlier else None, **options)
    elif earlier or options["profile"]:
        option = "--compare" if earlier else "--profile"
        raise click.UsageError(
            f"{option} is for the load scenario; the others compare two settings themselves"
        )
    elif options["url"]:
        raise CliError(
            f"scenario {scenario} needs the local daemon",
            "it loads the model with settings of its own, which --url cannot do",
            f"llmbox bench --scenario {scenario}",
        )
    else:
        names = list(SCENARIOS) if scenario == "all" else [scenario]
        _compare(program, names, **options)


LevelResult = tuple[int, Summary, list[str]]
"""Streams of a level, its figures and the errors of its requests."""


def _load(
    program: Program,
    model: str,
    url: str | None,
    key: str,
    as_json: bool,
    before: Levels | None,
    profile: bool,
    **options: Any,
) -> None:
    if profile and url:
        raise CliError(
            "--profile needs the local daemon",
            "another server does not report its steps",
            "llmbox bench --profile",
        )
    target = BenchTarget(url or local_url(program), model, key)
    profiles: dict[int, LevelProfile] = {}

    async def measure(level: int, work: Workload) -> BenchRun:
        if not profile:
            return await run(target, work)
        async with profiled(program.client, model) as session:
            result = await run(target, work)
        if result.good():
            profiles[level] = session.of_level(result.seconds)
        return result

    rows = asyncio.run(_levels(target, options, measure))
    data = _figures(target, rows, profiles)
    _keep(program, target, data)
    compared = ratios(data, before) if before is not None else None
    if as_json:
        result = {"url": target.url, "model": model, "levels": data}
        output.write_json("bench", result if compared is None else {**result, "ratios": compared})
        return
    headers = ("STREAMS", "OUT TOK/S", "TTFT P50", "P95", "TPOT P50", "GAP P99", "MAX", "ERRORS")
    output.table(headers, [_row(level, summary) for level, summary, _ in rows], right=range(8))
    if compared is not None:
        _print_ratios(compared)
    for level, of_level in profiles.items():
        _print_profile(level, of_level)


def _figures(
    target: BenchTarget, rows: Sequence[LevelResult], profiles: Mapping[int, LevelProfile]
) -> list[dict[str, Any]]:
    """Return the figures of each level as `--json` has them. Raises CliError where no request succeeded."""
    failed = next((error for _, _, errors in rows for error in errors), None)
    if failed and not any(summary.output_tokens for _, summary, _ in rows):
        raise no_success(target, failed)
    data = [
        {"concurrency": level, **summary.as_dict(), "first_error": (errors or [""])[0]}
        for level, summary, errors in rows
    ]
    for figures in data:
        if (found := profiles.get(figures["concurrency"])) is not None:
            figures["profile"] = found.as_dict()
    return data


def _print_profile(level: int, profile: LevelProfile) -> None:
    engine, streams = profile.engine, "stream" if level == 1 else "streams"
    each = f"{engine.tokens / engine.steps:.1f} tokens, {profile.seconds / engine.steps * 1e3:.2f} ms each"
    output.write(f"\n{level} {streams}: {engine.steps} steps of {each} by the client's clock")
    table, sentences = profile.lines()
    output.table(("WHERE THE TIME GOES", "MS A STEP", "SHARE"), table, right=(1, 2))
    for sentence in sentences:
        output.write(sentence)


def _print_ratios(compared: dict[int, dict[str, float | None]]) -> None:
    output.write("\nThis run divided by the earlier one (other load on the machine is included in both):")
    rows = [
        (level, *("-" if value is None else f"{value:.2f}" for value in figures.values()))
        for level, figures in compared.items()
    ]
    output.table(("STREAMS", "OUT TOK/S", "TTFT P50", "TPOT P50", "GAP P99"), rows, right=range(5))


def _keep(program: Program, target: BenchTarget, levels: list[dict[str, Any]]) -> None:
    """Save the run for `llmbox top`, which compares runs. A full disk costs the comparison, not the
    result.
    """
    try:
        keep_run(bench_folder(program.paths), target.model, target.url, levels)
    except OSError as error:
        output.say(f"This run was not saved: {error}")


async def _levels(
    target: BenchTarget,
    options: dict[str, Any],
    measure: Callable[[int, Workload], Awaitable[BenchRun]],
) -> list[LevelResult]:
    rows = []
    # New prompts in every run: those of the last one may be in the server's prefix cache.
    prompts = Prompts(token_hex(8), id_range(options["ids"]))
    first = await run(target, uniform(prompts, 1, 1, options["prompt"], 8))  # it pays for warm-up
    if first.errors:
        raise no_success(target, first.errors[0])
    for level in options["levels"]:
        count = options["per_level"] or max(8, 4 * level)
        work = uniform(prompts, count, level, options["prompt"], options["output_tokens"])
        result = await measure(level, work)
        rows.append((level, summarise(result), result.errors))
        output.say(f"{level} {'stream' if level == 1 else 'streams'}: {result.output_rate:.1f} tok/s")
    return rows


def _row(level: int, summary: Summary) -> tuple[object, ...]:
    gaps = (summary.inter_token_p99, summary.inter_token_max)
    times = (summary.ttft_p50, summary.ttft_p95, summary.tpot_p50, *gaps)
    return (level, f"{summary.output_tokens_per_s:.1f}", *map(show_ms, times), summary.errors)


def _compare(program: Program, names: list[str], model: str, scale: str, rounds: int, **options: Any) -> None:
    from ...bench.ab_compare import compare

    url = local_url(program)
    path = str(program.resolve(model).path)
    results = []
    for name in names:
        scenario = SCENARIOS[name]
        result = asyncio.run(
            compare(
                program.client,
                url,
                path,
                scenario,
                SCALES[scale],
                rounds=rounds,
                id_range=id_range(options["ids"]),
                say=output.say,
            )
        )
        results.append(result)
        if result.errors:
            raise CliError(f"scenario {name} failed", result.errors[0], "llmbox logs")
    if options["as_json"]:
        data = {"model": model, "scale": scale, "scenarios": [asdict(result) for result in results]}
        output.write_json("bench.scenarios", data)
        return
    for result in results:
        first, second = result.variants
        output.write(f"{result.scenario}: {SCENARIOS[result.scenario].question}")
        rows = [(name, f"{a:.4g}", f"{b:.4g}", str(ratio)) for name, (a, b, ratio) in result.figures.items()]
        output.table(("FIGURE", first.upper(), second.upper(), f"{second}/{first}"), rows, right=(1, 2, 3))
