"""Perplexity of a model on a text, the quality measure of quantization."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint.files import MAX_BYTES, read_regular
from ..config import EngineConfig
from ..core.engine import Engine
from ..ipc.messages import AddRequest
from ..model_config.config import parse_config
from ..sampling_params import SamplingParams

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
