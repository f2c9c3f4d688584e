"""`llmbox quantize`: a checkpoint of integer weights from one of floats."""

from pathlib import Path
from typing import Any

import click

from llmbox.engine.rounded import FORMATS

from . import output
from .engine_job import run_job
from .lazy import Command
from .program import Program, pass_program

WORST_SHOWN = 5


@click.command(cls=Command)
@click.argument("model")
@click.option("--to", "to", type=click.Choice(FORMATS), required=True, help="Format of the weights.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to make; default is MODEL's name and the format, here.",
)
@click.option(
    "--eval",
    "text",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Measure the perplexity of this text before and after; blank lines divide it.",
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="Let the model write a text first and choose the integers by it: slower, nearer to the original.",
)
@click.option("--threads", type=click.IntRange(1, 4096), help="CPU threads; default is the physical cores.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@pass_program
def quantize(
    program: Program,
    *,
    model: str,
    to: str,
    out: Path | None,
    text: Path | None,
    calibrate: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Round the weights of MODEL to integers, into a folder that loads by itself.

    It holds the same integers that `--quant` makes at each load, or better ones with --calibrate, takes a
    half or a quarter of the disk, and needs no original. The format is described in docs/quantisation.md.
    """
    ref = program.resolve(model)
    short = ref.name.rpartition("/")[2].partition("@")[0]
    target = (out or Path(f"{short}-{to}")).absolute()
    arguments = [str(ref.path), str(target), to]
    if calibrate:
        arguments.append("--calibrate")
    if text is not None:
        arguments += ["--eval", str(text.absolute())]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    module = "llmbox.engine.quantize"
    report = run_job(program, module, arguments, failed="not quantised", words=_words)
    if as_json:
        output.write_json("quantize", {"model": ref.name, "out": str(target), **report})
    else:
        _print(report, target)


def _words(what: str, done: int, total: int) -> str:
    share = f"{done / max(1, total):.0%}"
    if what == "writing":
        return f"the model has written {share} of a text to learn from"
    return f"rounded {share} of {output.size(total)}"


def _print(report: dict[str, Any], target: Path) -> None:
    before, after = report["bytes_before"], report["bytes_after"]
    output.write(f"{target}")
    output.write(f"  size      {output.size(before)} before, {output.size(after)} now ({after / before:.0%})")
    output.write(
        f"  error     {report['relative']:.2%} of the weights' norm; {report['tensors']} tensors rounded, "
        f"{report['kept']} kept"
    )
    if report["calibrated"]:
        output.write(f"  chosen by {report['calibrated']} tokens of the model's own text")
    if report["perplexity_before"] is not None:
        was, now = report["perplexity_before"], report["perplexity_after"]
        output.write(f"  perplexity  {was:.3f} before, {now:.3f} now ({now / was - 1:+.2%})")
    output.write("")
    rows = [
        (each["name"], each["format"], f"{each['relative']:.2%}", f"{each['weighted']:.2%}")
        for each in report["worst"][:WORST_SHOWN]
    ]
    output.table(("LARGEST ERRORS", "FORMAT", "RELATIVE", "WEIGHTED"), rows, right=(2, 3))
    output.write("")
    output.write(f"Serve it: llmbox up {target}")
