"""What rounding costs in quality: perplexity of a text, and answers to held-out questions.

    python -P tests/bench/quality.py [MODEL_DIR [TEXT]]
    python -P tests/bench/quality.py --formats-of-gpus
    python -P tests/bench/quality.py --published

Each row is one format of the weights and one of keys and values. The defaults are the built-in model and its
held-out questions with their answers, as one text. Of the built-in model the same questions are also asked
greedily. Blank lines divide a text into sequences of their own.

The formats that run on GPUs only are measured by what they mean in plain torch, on the built-in model;
`make gpu-check` measures the same with the kernels. With `--published` weights are rounded to nearest into
the formats of other tools, and read as these publish them.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu import quality as formats_of_gpus
from gpu.report import Report
from llmbox.engine.checkpoint.formats.registry import read_weight_format
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.quantize.calibration import config_for, perplexity, sequences_of
from support.builtin_model import ASSETS, IN_SCOPE, ROOT, answers, is_right, user
from support.format_styles import STYLES
from support.published_formats import publish

TEXT = ROOT / "packaging/builtin_model/perplexity.txt"
ROWS = (
    ("none", "auto"),
    ("int8", "auto"),
    ("int8-g32", "auto"),
    ("int4", "auto"),
    ("int4-g128", "auto"),
    ("int4-mix", "auto"),
    ("none", "int8"),
    ("int8", "int8"),
    ("int4", "int8"),
)
"""Weights, keys and values."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", default=ASSETS)
    parser.add_argument("text", type=Path, nargs="?", default=TEXT)
    parser.add_argument("--formats-of-gpus", action="store_true")
    parser.add_argument("--published", action="store_true")
    options = parser.parse_args()
    if options.published:
        measure_published(options.model.resolve(), options.text)
        return
    if options.formats_of_gpus:
        formats_of_gpus.table(Report(float("inf")), formats_of_gpus.in_plain_torch)
        return
    measure(options.model.resolve(), options.text)


def measure(model: Path, text: Path) -> None:
    sequences = sequences_of(model, text.read_text(encoding="utf-8"))
    plain = None
    print("| weights | keys and values | perplexity | held-out answers right |\n| --- | --- | --- | --- |")
    for quant, kv in ROWS:
        engine = load_engine(config_for(model, None, quant=quant, kv_dtype=kv), lambda _: None)
        found = perplexity(engine, sequences)
        plain = plain or found
        shown = "-" if model != ASSETS.resolve() else f"{right(engine)} of {len(IN_SCOPE)}"
        print(
            f"| {quant} | {engine.info.kv_dtype} | {found:.3f} ({found / plain - 1:+.2%}) | {shown} |",
            flush=True,
        )


def measure_published(model: Path, text: Path) -> None:
    sequences = sequences_of(model, text.read_text(encoding="utf-8"))
    plain = perplexity(load_engine(config_for(model, None), lambda _: None), sequences)
    print("| format | in memory | perplexity |\n| --- | --- | --- |")
    print(f"| unquantized | bfloat16 | {plain:.3f} |", flush=True)
    for name, style in STYLES.items():
        with tempfile.TemporaryDirectory() as folder:
            published = shutil.copytree(model, Path(folder) / "model")
            publish(published, style.entry, style.store, others=style.others)
            label = read_weight_format(style.entry).label
            engine = load_engine(config_for(published, None), lambda _: None)
            found = perplexity(engine, sequences)
        held = "dequantized" if engine.info.quant == "none" else engine.info.quant
        print(f"| {name}: {label} | {held} | {found:.3f} ({found / plain - 1:+.2%}) |", flush=True)


def right(engine: Engine) -> int:
    texts = answers(engine, user(*(question["ask"] for question in IN_SCOPE)))
    return sum(is_right(text, question["must"]) for text, question in zip(texts, IN_SCOPE, strict=True))


if __name__ == "__main__":
    main()
