"""Calibration for GPTQ, the input second moment E[x xᵀ] of every linear over a calibration text; and
perplexity of a model on a text, the quality measure of quantization.

Calibration runs one layer at a time, as the moments of a large model would take more memory than its
weights. T rows of the sequences that pass through a layer together, E hidden, I inputs of a linear.
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.op_types import BatchLayout, KVShape
from llmbox.kernels.ops import KVCache, Ops, PackedLinear
from llmbox.kernels.reference import REFERENCE

from ..checkpoint.files import MAX_BYTES, read_json, read_regular
from ..config import EngineConfig
from ..core.engine import Engine
from ..device.device import to_device
from ..errors import ModelError
from ..executor.build import load_engine
from ..ipc.messages import AddRequest
from ..model.decoder import Decoder
from ..model.forward_context import ForwardContext
from ..model.registry import build_model
from ..model.rotary import Rotary
from ..model_config.config import ModelConfig, parse_config
from ..sampling_params import SamplingParams
from ..weights.checkpoint import Checkpoint
from ..weights.source import WeightRequest

LONGEST = 1000
"""Maximum tokens of a sequence; longer ones are truncated."""


def sequences_of(model: Path, text: str) -> list[list[int]]:
    """Split a text at blank lines and tokenize the parts. Raises ValueError for an empty text."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - engines know only token ids

    tokenizer = Tokenizer.from_buffer(read_regular(model / "tokenizer.json", MAX_BYTES))
    parts = [tokenizer.encode(part).ids[: longest(model)] for part in text.split("\n\n")]
    found = [ids for ids in parts if len(ids) > 1]
    if not found:
        raise ValueError("the text has no two tokens in a row")
    return found


def perplexity(engine: Engine, sequences: Sequence[Sequence[int]]) -> float:
    """Return exp(mean negative log-likelihood per token) over all sequences."""
    total, count = 0.0, 0
    for number, ids in enumerate(sequences):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.add(AddRequest(request_id=str(number), prompt_ids=list(ids), params=params))
    while engine.has_work:
        for output in engine.step().outputs:
            for entry in output.prompt_logprobs or []:
                if entry is not None:
                    total, count = total - entry.logprob, count + 1
    return math.exp(total / count)


def longest(model: Path) -> int:
    return min(LONGEST, parse_config(model).context_limit - 1)


def config_for(model: Path, threads: int | None, **changes: object) -> EngineConfig:
    """Return the config of an engine on the CPU for measurements."""
    context = longest(model) + 1
    settings = {"device": "cpu", "context": context, "threads": threads, "prefix_cache": False, **changes}
    return EngineConfig(model_path=str(model), name=model.name, **settings)  # type: ignore[arg-type]


BLOCK = 16
AT_ONCE = 8
"""Sequences in one forward pass: bounds the memory of KV and activations."""
CPU = torch.device("cpu")


@dataclass
class CalibrationPart:
    """Batch of sequences between two layers."""

    ids_T: Tensor
    ragged: BatchLayout
    x_TE: Tensor
    """Input of the next layer."""
    residual_TE: Tensor


class LinearNames:
    """`WeightObserver` that maps packed linears to their names."""

    def __init__(self) -> None:
        self.of: dict[int, str] = {}

    def vector(self, name: str, vector: Tensor) -> None:
        pass

    def packed(self, asked: WeightRequest, packed: PackedLinear, bias_O: Tensor | None) -> None:  # noqa: ARG002
        if asked.kind == "linear":
            self.of[id(packed)] = asked.name


class Calibration:
    """Unquantized model and calibration text, executed layer by layer as moments are requested."""

    def __init__(
        self, directory: Path, config: ModelConfig, dtype: torch.dtype, sequences: Sequence[Sequence[int]]
    ) -> None:
        """Load the model. `sequences`: token ids of the text. Raises ModelError."""
        self._sums: dict[str, Tensor] = {}
        names = LinearNames()
        source = Checkpoint(
            directory, replace(REFERENCE, linear=self._record_moment), dtype, CPU, keeper=names
        )
        model = build_model(config, source)
        assert isinstance(model, Decoder)  # `quantize` refuses encoders
        self._model = model
        self._names = names.of
        self._ops: Ops = REFERENCE
        self._rows = sum(map(len, sequences))
        longest = max(map(len, sequences))
        self._rotary = Rotary(config, longest, CPU)
        self._cache = self._make_cache(config, dtype, longest)
        self._parts = list(self._begin(sequences))
        self._next = 0

    @property
    def names(self) -> list[str]:
        """Names of all linears, in the order of the layers."""
        return list(self._names.values())

    @torch.inference_mode()
    def moment(self, name: str) -> Tensor:
        """Return the second moment of a linear's inputs, float32 [I, I]. Call in the order of the layers.

        Raises ModelError where it is not finite.
        """
        while name not in self._sums:
            assert self._next < len(self._model.layers), f"{name} is in no layer, or in one before"
            self._sums.clear()
            self._run_layer()
        moment_II = self._sums[name] / self._rows
        if not moment_II.isfinite().all():
            raise ModelError(f"the rows that {name} meets are not finite: quantize without --calibrate")
        return moment_II

    def _record_moment(self, packed: PackedLinear, x_TI: Tensor) -> Tensor:
        wide_TI, name = x_TI.float(), self._names[id(packed)]
        sums = self._sums.setdefault(name, torch.zeros(x_TI.shape[1], x_TI.shape[1]))
        sums.addmm_(wide_TI.T, wide_TI)
        return REFERENCE.linear(packed, x_TI)

    def _run_layer(self) -> None:
        layers = self._model.layers
        layer = layers[self._next]
        self._next += 1
        for part in self._parts:
            part.x_TE = layer(part.x_TE, part.residual_TE, self._forward(part))
            if self._next < len(layers):
                part.x_TE = layers[self._next].enter(part.x_TE, part.residual_TE)

    @torch.inference_mode()
    def _begin(self, sequences: Sequence[Sequence[int]]) -> Iterator[CalibrationPart]:
        first = self._model.layers[0]
        assert self._model.embedding is not None
        for start in range(0, len(sequences), AT_ONCE):
            taken = sequences[start : start + AT_ONCE]
            ids_T = torch.tensor([token for ids in taken for token in ids])
            layout = prefill_layout([len(ids) for ids in taken])
            self._model.embedding.place(layout)
            residual_TE = self._model.embedding(ids_T)
            x_TE = first.first(residual_TE)
            yield CalibrationPart(ids_T, layout, x_TE, residual_TE)

    def _forward(self, part: CalibrationPart) -> ForwardContext:
        lengths_N = torch.tensor(part.ragged.query_lens)
        is_long_T = (lengths_N > self._rotary.short_context).repeat_interleave(lengths_N)
        is_long = is_long_T if self._rotary.short_context else False
        cos_ATD, sin_ATD = self._rotary.rows(part.ragged.positions_T, is_long)
        windows = set(self._model.config.windows)
        plans = {window: self._ops.plan_attention(part.ragged, self._cache, window) for window in windows}
        return ForwardContext(part.ids_T, cos_ATD, sin_ATD, self._cache, plans)

    def _make_cache(self, config: ModelConfig, dtype: torch.dtype, longest: int) -> KVCache:
        shape = KVShape(
            num_layers=config.num_layers,
            num_blocks=AT_ONCE * -(-longest // BLOCK),
            block_size=BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            compute_dtype=dtype,
        )
        cache = self._ops.make_kv_cache(shape, CPU)
        self._ops.clear_blocks(cache, list(range(shape.num_blocks)))
        return cache


def prefill_layout(lengths: Sequence[int]) -> BatchLayout:
    """Build the layout of a prefill of whole sequences, each in separate KV blocks."""
    blocks = [-(-length // BLOCK) for length in lengths]
    starts, first = array("i", [0]), 0
    tables_NB = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for n, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        starts.append(starts[-1] + length)
        tables_NB[n, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    positions_T = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    row_T = torch.repeat_interleave(torch.tensor(lengths))
    return BatchLayout(
        block_size=BLOCK,
        query_lens=list(lengths),
        contexts=list(lengths),
        query_starts_N1=to_device(starts, CPU),
        context_lens_N=torch.tensor(lengths, dtype=torch.int32),
        block_tables_NB=tables_NB,
        positions_T=positions_T,
        slots_T=tables_NB[row_T, positions_T // BLOCK] * BLOCK + positions_T % BLOCK,
    )


SEQUENCES, LENGTH = 64, 256
"""Number of sequences, and tokens in each."""
MOST_BEGINNINGS = 16


def generate_calibration_text(
    model: Path, threads: int, progress: Callable[[int, int], None], sequences: int = SEQUENCES
) -> list[list[int]]:
    """Generate sequences of token ids at temperature 1. The same model generates the same text."""
    config: EngineConfig = config_for(model, threads)
    assert config.context is not None
    length = min(LENGTH, config.context - 1)
    engine = load_engine(config, lambda _: None)
    starts = prompt_seeds(model)
    texts = {str(n): [starts[n % len(starts)]] for n in range(sequences)}
    for n, (name, ids) in enumerate(texts.items()):
        params = SamplingParams(max_tokens=length - 1, temperature=1.0, seed=n)
        engine.add(AddRequest(request_id=name, prompt_ids=list(ids), params=params))
    done = 0
    while engine.has_work:
        for output in engine.step().outputs:
            texts[output.request_id] += output.token_ids
            done += len(output.token_ids)
        progress(done, sequences * (length - 1))
    return list(texts.values())


def prompt_seeds(model: Path) -> list[int]:
    """Return first tokens of the sequences: special tokens, for diverse activations, else spread-out ids."""
    vocabulary = parse_config(model).vocab_size
    tokenizer = model / "tokenizer.json"
    added = read_json(tokenizer).get("added_tokens") if tokenizer.is_file() else None
    special = [token["id"] for token in added or [] if token.get("special") and token["id"] < vocabulary]
    return special[:MOST_BEGINNINGS] or list(range(0, vocabulary, -(-vocabulary // MOST_BEGINNINGS)))
