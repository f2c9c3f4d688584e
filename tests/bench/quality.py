"""What quantisation costs in quality: perplexity of a text under each weight format.

    python tests/bench/quality.py MODEL_DIR [TEXT]

TEXT is cut into conversations at blank lines, each a sequence of its own; the default is the built-in model's
held-out questions and answers.
"""

import math
import sys
from pathlib import Path

from tokenizers import Tokenizer

from llmbox.engine.config import EngineConfig
from llmbox.engine.core import Engine
from llmbox.engine.loader import load_engine
from llmbox.engine.messages import AddRequest
from llmbox.engine.sampling import SamplingParams

HELD_OUT = Path(__file__).parents[2] / "packaging/builtin_model/perplexity.txt"
FORMATS = ("none", "int8", "int8-g32", "int4", "int4-g128")


def main() -> None:
    model = Path(sys.argv[1])
    text = Path(sys.argv[2]) if len(sys.argv) > 2 else HELD_OUT
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sequences = [tokenizer.encode(part).ids for part in text.read_text(encoding="utf-8").split("\n\n")]
    plain = None
    for quant in FORMATS:
        config = EngineConfig(model_path=str(model), name="m", device="cpu", quant=quant, context=1024)
        perplexity = measure(load_engine(config, lambda _: None), [ids[:1000] for ids in sequences])
        plain = plain or perplexity
        print(f"{quant:10} {perplexity:9.4f}  {100 * (perplexity / plain - 1):+6.2f} %")


def measure(engine: Engine, sequences: list[list[int]]) -> float:
    total, count = 0.0, 0
    for number, ids in enumerate(sequences):
        if len(ids) < 2:
            continue
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.add(AddRequest(request_id=str(number), prompt_ids=ids, params=params))
    while engine.has_work:
        for output in engine.step().outputs:
            for entry in output.prompt_logprobs or []:
                if entry is not None:
                    total, count = total - entry.logprob, count + 1
    return math.exp(total / count)


if __name__ == "__main__":
    main()
