"""A `random_model.py` model as GGUF files, by llama.cpp's own converter and quantizer.

    python -P tests/bench/to_gguf.py --source LLAMA_CPP --bin LLAMA_CPP/build/bin --model DIR --out DIR

Needs what the converter needs (torch, transformers, sentencepiece). It refuses tokenizers that it does not
know; the made-up one is declared to split text as Qwen2's does, which changes nothing for prompts of token
ids.
"""

import argparse
import runpy
import subprocess
import sys
from pathlib import Path

FORMATS = ("Q8_0", "Q4_0", "Q4_K_M")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("source", "bin", "model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    model, out = options.model.resolve(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    full = out / f"{model.name}-BF16.gguf"
    if not full.exists():
        convert(options.source.resolve(), model, full)
    for name in FORMATS:
        if not (target := out / f"{model.name}-{name}.gguf").exists():
            subprocess.run([options.bin / "llama-quantize", full, target, name], check=True)


def convert(source: Path, model: Path, target: Path) -> None:
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "qwen2"
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outtype", "bf16", "--outfile", str(target)]
    try:
        runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise


if __name__ == "__main__":
    main()
