"""Acceptance of lookahead decoding's n-grams: `python -P tests/bench/lookahead_acceptance.py MODEL`.

Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", 2024: beside each
token, a window of W guesses is refined by Jacobi steps, and the n-grams of its trajectories are pooled by
their first token. Each step verifies up to G of the pool's n-grams that begin with the last token.

Counts need no timing: greedy answers of transformers in float32, W columns of N - 1 levels, each computed as
a sequence of its own. Rows of a step: 1 + (W + G) * (N - 1).
"""

import argparse
from collections import OrderedDict, defaultdict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "Write a short story about a lighthouse.",
    "Explain how a bicycle stays upright.",
    "List five rules for a good password.",
    "def add(a, b):",
)


@torch.inference_mode()
def last_tokens(model: torch.nn.Module, rows: list[list[int]]) -> list[int]:
    """Return the greedy next token of each row; rows may differ in length."""
    size = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (size - len(row))] for row in rows])
    ends = torch.tensor([len(row) - 1 for row in rows])
    return model(ids).logits[torch.arange(len(rows)), ends].argmax(-1).tolist()


def measure(
    model: torch.nn.Module, prompt: list[int], length: int, window: int, order: int, most: int
) -> tuple[int, int]:
    """Return the steps and tokens of one answer."""
    pool: defaultdict[int, OrderedDict[tuple[int, ...], None]] = defaultdict(OrderedDict)
    text, steps = list(prompt), 0
    levels = [[prompt[place % len(prompt)] for place in range(window)] for _ in range(order - 1)]
    while len(text) - len(prompt) < length:
        columns = [
            [*text, *levels[0][: place + 1], *[level[place] for level in levels[1:]]]
            for place in range(window)
        ]
        fresh = last_tokens(model, columns)
        for place in range(window):
            first, *rest = [level[place] for level in levels] + [fresh[place]]
            pool[first][tuple(rest)] = None
        levels = [*levels[1:], fresh]
        right: list[int] = []
        token = last_tokens(model, [text])[0]
        guesses = list(pool[token])[-most:]
        text.append(token)
        for guess in guesses:  # each is verified in the same step
            taken: list[int] = []
            for wanted in guess:
                if last_tokens(model, [[*text, *taken]])[0] != wanted:
                    break
                taken.append(wanted)
            right = max(right, taken, key=len)
        text += right
        steps += 1
    return steps, len(text) - len(prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    for window, order, most in ((5, 3, 5), (7, 4, 7)):
        counts = []
        for text in PROMPTS:
            message = [{"role": "user", "content": text}]
            prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
            counts.append(measure(model, list(prompt), options.tokens, window, order, most))
        steps, tokens = map(sum, zip(*counts, strict=True))
        rows = 1 + (window + most) * (order - 1)
        print(
            f"W {window:2} N {order} G {most:2}: {tokens / steps:.2f} tokens a step of {rows} rows",
            flush=True,
        )


if __name__ == "__main__":
    main()
