"""`llmbox import`: a model directory of a GGUF file."""

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from llmbox.engine.errors import ModelError
from llmbox.engine.gguf.file import Gguf, read_gguf
from llmbox.engine.gguf.settings import config_of, is_rounded
from llmbox.engine.rounded import FORMATS

from ..errors import CliError, Exit
from ..suggest import did_you_mean
from . import output
from .engine_job import run_job
from .lazy import Command
from .program import Program, pass_program

AFTER_ROUNDING = "int8"
"""What a file of rounded weights becomes unless told: it adds little to the error that they have."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@click.command(name="import", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "to",
    type=click.Choice(("auto", "none", *FORMATS)),
    default="auto",
    help="Format of the weights; auto: int8 of rounded ones, none (bfloat16) of floats.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to make; default is the file's name, here.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Take tokenizer and chat template of this folder instead of the file's.",
)
@click.option("--threads", type=click.IntRange(1, 4096), help="CPU threads; default is the physical cores.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
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
    """Make a model folder of a GGUF FILE, as llama.cpp, Ollama and LM Studio keep models.

    Done once: the folder holds safetensors and the file's tokenizer and chat template, and needs the file no
    more. Of a model in several files name the first. See docs/models.md for what can be read.
    """
    _require_file(file)
    try:
        gguf = read_gguf(file.absolute())
        config_of(gguf)  # what cannot be read is said at once
    except ModelError as error:
        raise CliError("not imported", str(error), "llmbox import --help", Exit.FAILED) from None
    if to == "auto":
        to = AFTER_ROUNDING if is_rounded(gguf) else "none"
    target = (out or Path(_name_of(gguf))).absolute()
    with tempfile.TemporaryDirectory(prefix="llmbox-import-") as beside:
        _take_tokenizer(gguf, tokenizer, Path(beside))
        arguments = [str(gguf.path), str(target), to, "--beside", beside]
        if threads is not None:
            arguments += ["--threads", str(threads)]
        module = "llmbox.engine.gguf.convert"
        report = run_job(program, module, arguments, failed="not imported", words=_words)
    if as_json:
        output.write_json("import", {"file": str(gguf.path), "out": str(target), **report})
    else:
        _print(report, target)


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


def _name_of(gguf: Gguf) -> str:
    """The file's, without what says that it is one of several; of a nameless blob what it says of itself."""
    if gguf.path.suffix == ".gguf":
        return re.sub(r"-\d{5}-of-\d{5}$", "", gguf.path.stem)
    name = gguf.metadata.get("general.name")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") if isinstance(name, str) else ""
    return plain or f"{gguf.architecture}-from-gguf"


def _take_tokenizer(gguf: Gguf, folder: Path | None, target: Path) -> None:
    if folder is None:
        from ..text.from_gguf import write_tokenizer

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


def _words(_what: str, done: int, total: int) -> str:
    return f"read {done / max(1, total):.0%} of {output.size(total)}"


def _print(report: dict[str, Any], target: Path) -> None:
    before, after = report["bytes_before"], report["bytes_after"]
    output.write(f"{target}")
    output.write(
        f"  size      {output.size(before)} in the file, {output.size(after)} now, {report['format']}"
    )
    if report["tensors"]:
        output.write(
            f"  error     {report['relative']:.2%} of the norm of the file's weights, by rounding to integers"
        )
    output.write("")
    output.write(f"Serve it: llmbox up {target}")
