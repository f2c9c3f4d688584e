"""Self-generated calibration text, for quantization without a data set."""

from collections.abc import Callable
from pathlib import Path

from ..checkpoint.files import read_json
from ..config import EngineConfig
from ..executor.build import load_engine
from ..ipc.messages import AddRequest
from ..model_config.config import parse_config
from ..sampling_params import SamplingParams
from .perplexity import config_for

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
