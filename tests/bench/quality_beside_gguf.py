"""Our rounding beside llama.cpp's: what each does to a model's predictions, and to single products.

    python -P tests/bench/quality_beside_gguf.py LLAMA_CPP/build/bin [MODEL_DIR [TEXT]]

llama.cpp's own library rounds the weights (`ggml.py`). All rounded weights then run as float32 through the
same kernels, with float rows: what is compared is the choice of the numbers, not how one computes with them.
The defaults are those of `quality.py`. The perplexity of a rounded model also moves by luck, in either
direction; the divergence from the unrounded model's predictions only grows, and tells more ways apart.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.ggml import Ggml, Wide, type_in
from bench.product_error import activations, errors, random_linears
from bench.quality import TEXT, right
from llmbox.engine.checkpoint.quantized_layout import SCALE, STEP, format_of
from llmbox.engine.core.engine import Engine
from llmbox.engine.executor.build import load_engine
from llmbox.engine.hardware.machine import read_cpu
from llmbox.engine.ipc.messages import AddRequest
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.shape import is_fine
from llmbox.engine.quantize.calibration import config_for, sequences_of
from llmbox.engine.quantize.quantize import packing_for, quantize
from llmbox.engine.sampling_params import SamplingParams
from llmbox.engine.weights.quantized import unpack_codes
from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.weight_packing import QuantizedWeight, to_numbers
from support.builtin_model import ASSETS, IN_SCOPE
from support.real_engines import runner_of

Way = Callable[[str, Tensor], Wide]
"""Rounds the weight of a name."""
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of each token of a text, by its predecessors."""

    logprobs_T: Tensor
    """Of the token that came."""
    all_TV: Tensor
    """Log-probabilities of all tokens. The last row of a sequence is among them, whose token nobody knows."""


@dataclass(frozen=True, slots=True)
class Difference:
    perplexity: float
    """Relative to that of the unrounded model, less 1."""
    error: float
    """Its standard error, of differences token by token."""
    divergence: float
    """Kullback-Leibler, of the unrounded predictions from these, a token's mean."""
    kept: float
    """Share of rows whose likeliest token stayed."""


def main() -> None:
    ggml = Ggml(Path(sys.argv[1]))
    model = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else ASSETS
    text = (Path(sys.argv[3]) if len(sys.argv) > 3 else TEXT).read_text(encoding="utf-8")
    torch.manual_seed(0)
    weights = {name: weight.float() for name, weight in load_file(model / "model.safetensors").items()}
    with tempfile.TemporaryDirectory() as folder:
        ways = model_ways(ggml, parse_config(model).num_layers)
        ways |= {f"{to}, calibrated": calibrated(model, to, Path(folder)) for to in ("int4", "int4-mix")}
        of_model(model, sequences_of(model, text), weights, ways)
    of_products(model, sequences_of(model, text), weights, product_ways(ggml))


def of_model(
    model: Path, sequences: list[list[int]], weights: dict[str, Tensor], ways: dict[str, Way]
) -> None:
    heads = (
        "weights",
        "bits, linears",
        "bits, all",
        "perplexity",
        "divergence",
        "first choice kept",
        "right",
    )
    print_row(*heads)
    print_row(*["---"] * len(heads))
    plain = None
    for name, way in ({"none": as_it_is} | ways).items():
        rounded = {key: way(key, weight) for key, weight in weights.items() if is_rounded(key)}
        wide = weights | {key: each.weight_OI for key, each in rounded.items()}
        found, answers = measured(model, wide, sequences)
        plain = plain or found
        told = difference(plain, found)
        linears = {key: each for key, each in rounded.items() if key not in TABLES}
        print_row(
            name,
            f"{bits(linears):.2f}",
            f"{bits(rounded):.2f}",
            f"{math.exp(-found.logprobs_T.mean()):.3f} ({told.perplexity:+.2%} ± {told.error:.2%})",
            f"{told.divergence:.5f}",
            f"{told.kept:.1%}",
            "-" if answers is None else f"{answers} of {len(IN_SCOPE)}",
        )


def of_products(
    model: Path, sequences: list[list[int]], weights: dict[str, Tensor], ways: dict[str, Way]
) -> None:
    linears = {key: weight for key, weight in weights.items() if is_rounded(key) and key not in TABLES}
    moments = activations(model, sequences, list(linears))
    print()
    print_row("linears", "bits", "this model's, the text's activations", "random, of Qwen3-0.6B's shapes")
    print_row(*["---"] * 4)
    for name, way in ways.items():
        real = errors({key: (weight, way(key, weight), moments[key]) for key, weight in linears.items()})
        made = errors({key: (weight, way(key, weight), None) for key, weight in random_linears()})
        size = bits({key: way(key, weight) for key, weight in linears.items()})
        print_row(name, f"{size:.3f}", f"{real:.2%}", f"{made:.2%}")


def model_ways(ggml: Ggml, layers: int) -> dict[str, Way]:
    def mixed(mix: str) -> Way:
        return lambda name, weight: ggml.rounded(weight, type_in(mix, name, layers, weight.shape[1]))

    def padded(mix: str) -> Way:
        return lambda name, weight: ggml.padded(weight, type_in(mix, name, layers))

    return {
        "int8": ours("int8"),
        "int8-g32": ours("int8-g32"),
        "Q8_0": mixed("Q8_0"),
        "int4": ours("int4"),
        "int4-g128": ours("int4-g128"),
        "int4-mix": ours("int4-mix", layers),
        "Q4_0": mixed("Q4_0"),
        "Q4_K_M": mixed("Q4_K_M"),
        "Q4_K_M, rows padded": padded("Q4_K_M"),
        "Q4_K, rows padded": padded("Q4_K"),
    }


def product_ways(ggml: Ggml) -> dict[str, Way]:
    def padded(name: str) -> Way:
        return lambda _, weight: ggml.padded(weight, name)

    names = ("int8-g32", "int4", "int4-g128")
    return {name: ours(name) for name in names} | {
        name: padded(name) for name in ("Q8_0", "Q4_0", "Q4_K", "Q5_0", "Q6_K")
    }


def ours(name: str, layers: int = 0) -> Way:
    """`layers`: of the model, where the format is mixed."""
    quant = QUANTS[name]
    packing = packing_for(quant, torch.float32, 1)

    def way(tensor: str, weight_OI: Tensor) -> Wide:
        fine = tensor in TABLES or (quant.is_mixed and is_fine(tensor.removesuffix(".weight"), layers))
        grid = format_of(quant, "head" if fine else "linear")
        assert grid is not None
        rounded = packing.round(grid, weight_OI)
        return Wide(rounded.floats(), bits_of(rounded))

    return way


def calibrated(model: Path, name: str, folder: Path) -> Way:
    """What `llmbox quantize --calibrate` makes."""
    nothing: Callable[[int, int], None] = lambda _done, _total: None  # noqa: E731
    quantize(model, folder / name, QUANTS[name], read_cpu().cores, nothing, nothing)
    stored = load_file(folder / name / "model.safetensors")

    def way(tensor: str, weight_OI: Tensor) -> Wide:
        quant = QUANTS[name] if stored[tensor].dtype == torch.uint8 else QUANTS[name].head
        codes_OI = unpack_codes(stored[tensor], quant, weight_OI.shape[1])
        steps_OS = stored.get(tensor + STEP)
        if steps_OS is not None:
            codes_OI = to_numbers(codes_OI, steps_OS, quant)
        rounded = QuantizedWeight(quant, codes_OI, stored[tensor + SCALE], steps_OS=steps_OS)
        return Wide(rounded.floats(), bits_of(rounded))

    return way


def as_it_is(_: str, weight_OI: Tensor) -> Wide:
    return Wide(weight_OI, weight_OI.numel() * 16)


def is_rounded(name: str) -> bool:
    return name in TABLES or name.endswith("_proj.weight")


def bits_of(rounded: QuantizedWeight) -> int:
    steps = 0 if rounded.steps_OS is None else rounded.steps_OS.numel() * 8
    return rounded.codes_OI.numel() * rounded.quant.bits + rounded.scales_OG.numel() * 16 + steps


def bits(rounded: dict[str, Wide]) -> float:
    """Of a weight."""
    return sum(each.bits for each in rounded.values()) / sum(
        each.weight_OI.numel() for each in rounded.values()
    )


def measured(
    model: Path, weights: dict[str, Tensor], sequences: list[list[int]]
) -> tuple[Predictions, int | None]:
    """And how many answers are right, of the built-in model."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for file in model.iterdir():
            if file.suffix != ".safetensors" and file.is_file():
                shutil.copyfile(file, here / file.name)
        config = json.loads((here / "config.json").read_text("utf-8"))
        config |= {"dtype": "float32", "torch_dtype": "float32"}
        (here / "config.json").write_text(json.dumps(config), "utf-8")
        save_file({name: weight.contiguous() for name, weight in weights.items()}, here / "model.safetensors")
        engine = load_engine(config_for(here, None, quant="none"), lambda _: None)
        return predictions(engine, sequences), right(engine) if model == ASSETS else None


def predictions(engine: Engine, sequences: list[list[int]]) -> Predictions:
    """Engines of one model give their rows in the same order."""
    decoder = runner_of(engine)._model
    logits, parts, logprobs = decoder.logits, [], []

    def recorded(hidden_RE: Tensor, *adapters: Tensor | None) -> Tensor:
        parts.append(logits(hidden_RE, *adapters))
        return parts[-1]

    decoder.logits = recorded
    for number, ids in enumerate(sequences):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.add(AddRequest(request_id=str(number), prompt_ids=list(ids), params=params))
    while engine.has_work:
        for output in engine.step().outputs:
            logprobs += [entry.logprob for entry in output.prompt_logprobs or [] if entry is not None]
    decoder.logits = logits
    vocabulary = decoder.config.vocab_size
    all_TV = torch.cat([part[:, :vocabulary].float().log_softmax(-1) for part in parts])
    return Predictions(torch.tensor(logprobs, dtype=torch.float64), all_TV)


def difference(plain: Predictions, other: Predictions) -> Difference:
    lost_T = plain.logprobs_T - other.logprobs_T
    divergence_T = (plain.all_TV.exp() * (plain.all_TV - other.all_TV)).sum(-1)
    kept_T = plain.all_TV.argmax(-1) == other.all_TV.argmax(-1)
    return Difference(
        perplexity=math.expm1(float(lost_T.mean())),
        error=float(lost_T.std()) / len(lost_T) ** 0.5,
        divergence=float(divergence_T.mean()),
        kept=float(kept_T.double().mean()),
    )


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
