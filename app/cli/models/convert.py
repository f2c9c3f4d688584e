"""`llmbox quantize` and `llmbox import`: work on weights in a process of its own, as the command line imports
no torch (`engine/ipc/spawn.py`).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from llmbox.engine.checkpoint.quantized_layout import COMPRESSED_FORMATS, FORMATS
from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.config import config_of, is_quantized, name_of
from llmbox.engine.gguf.reader import GgufFile, read_gguf
from llmbox.engine.ipc.spawn import Launch

from ...config.model_settings import CacheSettings
from ...daemon.run import with_caches
from ...errors import CliError, Exit
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...util import formatting
from ...util.formatting import did_you_mean, format_compile_progress
from .. import output

EXITS = {"does_not_fit": Exit.DOES_NOT_FIT, "bad_model": Exit.FAILED}

Words = Callable[[str, int, int], str]
"""Function from (stage, amount done, total amount) to a line for people."""


def run_job(
    program: Program, module: str, arguments: Sequence[str], *, failed: str, words: Words
) -> dict[str, Any]:
    """Run a job and return its report. The job ends when this command is interrupted. Raises CliError, which
    begins with `failed`.
    """
    launch = with_caches(Launch(), program.paths, CacheSettings(repacked_gb=0))
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **launch.env},
        text=True,
    )
    line = output.ProgressLine()
    try:
        assert process.stdout is not None
        for message in _messages(process.stdout):
            if "error" in message:
                code, why = message["error"]["code"], message["error"]["message"]
                raise CliError(failed, why, "llmbox ls", EXITS.get(code, Exit.FAILED))
            if "report" in message:
                report: dict[str, Any] = message["report"]
                return report
            for what, (done, total) in message.items():
                line.update(
                    (format_compile_progress if what == "compiling" else partial(words, what))(done, total)
                )
    finally:
        line.close()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    last = stderr.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    raise CliError(failed, last[0], "llmbox doctor", Exit.FAILED)


def _messages(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            message: dict[str, Any] = json.loads(line)
            yield message


WORST_SHOWN = 5


threads_option = click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(1, 4096),
    help="CPU threads; default: one for each physical core.",
)


@click.command(cls=Command)
@click.argument("model")
@click.option(
    "--to",
    "to",
    type=click.Choice((*COMPRESSED_FORMATS, *FORMATS)),
    required=True,
    help="Format of the weights; vLLM and transformers read the first four too.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to create; default: named after MODEL and the format, in the current folder.",
)
@click.option(
    "--eval",
    "text",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Measure the perplexity of this text before and after; blank lines separate its parts.",
)
@click.option(
    "--calibrate",
    is_flag=True,
    help="Calibrate with GPTQ on text that the model writes itself: slower, but closer to the original.",
)
@threads_option
@json_option
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
    """Quantize the weights of MODEL to integers or FP8, into a new model folder.

    w4a16-g128, w4a16-g32, w8a8 and fp8 are formats of compressed-tensors. The others hold the integers that
    `--quant` makes at each load; --calibrate gives better ones. docs/quantization.md describes them all.
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
    module = "llmbox.engine.quantize.quantize"
    report = run_job(program, module, arguments, failed="not quantized", words=_words)
    if as_json:
        output.write_json("quantize", {"model": ref.name, "out": str(target), **report})
    else:
        _print(report, target)


def _words(what: str, done: int, total: int) -> str:
    share = f"{done / max(1, total):.0%}"
    if what == "writing":
        return f"calibration text: {share} written"
    return f"quantized {share} of {formatting.size(total)}"


def _print(report: dict[str, Any], target: Path) -> None:
    before, after = report["bytes_before"], report["bytes_after"]
    output.write(f"{target}")
    output.write(
        f"  size      {formatting.size(before)} before, {formatting.size(after)} now ({after / before:.0%})"
    )
    output.write(
        f"  error     {report['relative']:.2%} of the weights' norm; {report['tensors']} tensors quantized, "
        f"{report['kept']} kept"
    )
    if report["calibrated"]:
        output.write(f"  calibrated on {report['calibrated']} tokens of the model's own text")
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


AFTER_ROUNDING = "int8"
"""Default target of a quantized file: it adds little to the error that its weights have."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


@click.command(name="import", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "to",
    type=click.Choice(("auto", "none", *FORMATS)),
    default="auto",
    help="Format of the weights; auto: int8 for quantized files, none (bfloat16) for floats.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to create; default: named after the file, in the current folder.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Take the tokenizer and chat template from this folder instead of the file.",
)
@threads_option
@json_option
@pass_program
def import_gguf(
    program: Program,
    *,
    file: Path,
    to: str,
    out: Path | None,
    tokenizer: Path | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Convert a GGUF FILE (llama.cpp, Ollama, LM Studio) to a model folder.

    The folder holds safetensors with the file's tokenizer and chat template; the file is not needed
    afterwards. For a model split over several files, name the first. See docs/models.md for what can be read.
    """
    _require_file(file)
    try:
        gguf = read_gguf(file.absolute())
        config_of(gguf)  # an unreadable file is reported at once
    except ModelError as error:
        raise CliError("not imported", str(error), "llmbox import --help", Exit.FAILED) from None
    if to == "auto":
        to = AFTER_ROUNDING if is_quantized(gguf) else "none"
    target = (out or Path(name_of(gguf))).absolute()
    with tempfile.TemporaryDirectory(prefix="llmbox-import-") as beside:
        _take_tokenizer(gguf, tokenizer, Path(beside))
        arguments = [str(gguf.path), str(target), to, "--beside", beside]
        if threads is not None:
            arguments += ["--threads", str(threads)]
        module = "llmbox.engine.quantize.convert_gguf"
        report = run_job(program, module, arguments, failed="not imported", words=_progress_words)
    if as_json:
        output.write_json("import", {"file": str(gguf.path), "out": str(target), **report})
    else:
        _print_import(report, target)


def _require_file(file: Path) -> None:
    if file.exists() and not file.is_dir():
        return
    folder = file if file.is_dir() else file.absolute().parent
    there = [each.name for each in folder.glob("*.gguf")] if folder.is_dir() else []
    if file.is_dir():
        why = f"{file} is a folder: name a GGUF file" + (f", such as {min(there)}" if there else "")
    else:
        why = f"{file} does not exist"
    hint = "" if file.is_dir() else did_you_mean(file.name, there)
    raise CliError("not imported", why, f"{hint}llmbox import FILE.gguf", Exit.NOT_FOUND)


def _take_tokenizer(gguf: GgufFile, folder: Path | None, target: Path) -> None:
    if folder is None:
        from ...text.tokenizer.gguf_tokenizer import write_tokenizer

        try:
            write_tokenizer(gguf.metadata, target)
        except ModelError as error:
            raise CliError("not imported", str(error), "llmbox import --help", Exit.FAILED) from None
        return
    if not (folder / "tokenizer.json").is_file():
        raise CliError(
            "not imported", f"{folder} has no tokenizer.json", "llmbox import --help", Exit.NOT_FOUND
        )
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def _progress_words(_what: str, done: int, total: int) -> str:
    return f"read {done / max(1, total):.0%} of {formatting.size(total)}"


def _print_import(report: dict[str, Any], target: Path) -> None:
    before, after = report["bytes_before"], report["bytes_after"]
    output.write(f"{target}")
    output.write(
        f"  size      {formatting.size(before)} in the file, {formatting.size(after)} now, {report['format']}"
    )
    if report["tensors"]:
        output.write(
            f"  error     {report['relative']:.2%} of the norm of the file's weights, by quantization"
        )
    output.write("")
    output.write(f"Serve it: llmbox up {target}")
