"""What a grammar costs a token, in CPU time of the engine's thread: `python -P tests/bench/grammar_masks.py`.

Over a made-up vocabulary of the size of Qwen3's. The answers are drawn at random from what is allowed.
"""

import random
import statistics
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))
from llmbox.engine.core.constraints.output_constraint import GrammarCompiler
from llmbox.engine.core.constraints.structured_output import GrammarVocabulary
from llmbox.engine.ipc.messages import Vocabulary
from llmbox.engine.sampling.logits_processors import masked_ids
from llmbox.engine.sampling_params import SamplingParams
from support.grammars import SCHEMA, wrapped

SIZE = 151_936
LOOSE = {"type": "object", "properties": {"title": {"type": "string"}, "notes": {"type": "string"}}}
KINDS = {
    "schema of four fields": {
        "json_schema": {**SCHEMA, "x-guidance": {"whitespace_pattern": r"[ \n\t]{0,40}"}}
    },
    "schema of free texts": {"json_schema": LOOSE},
    "schema of a text of at most 500": {"json_schema": {"type": "string", "maxLength": 500}},
    "regex": {"lark_grammar": "start: /[a-z]{1,12}@[a-z]{1,12}\\.(com|org)/"},
}
T = TypeVar("T")


def vocabulary() -> Vocabulary:
    rng, texts = random.Random(1), [bytes([byte]) for byte in range(256)]
    known = set(texts)
    while len(texts) < SIZE - 1:
        word = rng.choice(("", " ")) + "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(2, 10)))
        text = (word + rng.choice(('",', '": ', "}", ".")) * (rng.random() < 0.1)).encode()
        if text not in known:
            known.add(text)
            texts.append(text)
    return Vocabulary(data=b"".join(texts), sizes=list(map(len, texts)), special=[])


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """In microseconds."""
    started = time.thread_time_ns()
    result = work()
    return result, (time.thread_time_ns() - started) / 1000


def main() -> None:
    told = vocabulary()
    tree = timed(lambda: GrammarVocabulary(told, SIZE).tree)[1]
    print(f"the vocabulary, once a load: {tree / 1000:.0f} ms")
    grammars = GrammarCompiler(SIZE)
    grammars.set_vocabulary(told)
    stop = SIZE - 1
    grammars.constraint(SamplingParams(max_tokens=1, grammar=wrapped({"lark_grammar": 'start: "a"'})), 0)
    for name, body in KINDS.items():
        params = SamplingParams(max_tokens=1, grammar=wrapped(body), stop_token_ids=(stop,))
        _, compiling = timed(lambda params=params: grammars.constraint(params, 0))
        masks, picks, guesses = [], [], []
        for seed in range(20):
            rng, ids = random.Random(seed), list[int]()
            constraint, _ = timed(lambda params=params: grammars.constraint(params, 0))
            while len(ids) < 60:
                mask, spent = timed(lambda ids=ids, at=constraint: at.allowed(ids))
                left, picking = timed(lambda mask=mask: masked_ids(mask, None))
                _, guessing = timed(lambda ids=ids, at=constraint: at.guess(ids, 15))
                masks.append(spent)
                guesses.append(guessing)
                picks.append(picking)
                ids.append(int(left[rng.randrange(len(left))]))
                if ids[-1] == stop:
                    break
        most = sorted(masks)[len(masks) * 95 // 100]
        print(f"{name}: compiled in {compiling / 1000:.1f} ms; a token's mask: median", end=" ")
        print(
            f"{statistics.median(masks):.0f} µs, 95th {most:.0f}; its ids {statistics.median(picks):.0f} µs;",
            f"a guess of drafts {statistics.median(guesses):.0f} µs,",
            f"95th {sorted(guesses)[len(guesses) * 95 // 100]:.0f}",
        )


if __name__ == "__main__":
    main()
