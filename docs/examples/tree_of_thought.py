"""Tree of thought (Yao et al., 2023): several next thoughts at each step, the likeliest are followed.

    python docs/examples/tree_of_thought.py [MODEL]

Thoughts go on from token ids, not from text: a branch begins with exactly the tokens of its parent. So their
keys and values are found in the prefix cache, and the question is computed once for all branches.
"""

import sys
from dataclasses import dataclass

from llmbox import LLM

QUESTION = """A farmer has 17 sheep and 5 hens. All but 9 sheep run away. Two hens hatch three chicks each.
How many animals are left? Think step by step, one short sentence a step.
"""
THOUGHT_TOKENS = 24


@dataclass(frozen=True)
class Branch:
    """A prompt with some thoughts behind it."""

    token_ids: list[int]
    text: str = ""
    score: float = 0.0
    """Log-probability of the thoughts, per token."""


@dataclass
class Tree:
    """Result of `grow`."""

    best: Branch
    prompt_tokens: int = 0
    """Tokens of all prompts that were sent."""
    cached_tokens: int = 0
    """Tokens of these whose keys and values were there."""


def grow(llm: LLM, question: str, depth: int = 3, branches: int = 3, kept: int = 2, seed: int = 1) -> Tree:
    """Think `depth` times: `branches` thoughts after each of the `kept` best ones."""
    (first,) = llm.generate(question, max_tokens=1)
    tree = Tree(Branch(first.prompt_token_ids))
    front = [tree.best]
    for level in range(depth):
        outputs = llm.generate(
            [branch.token_ids for branch in front],
            n=branches,
            max_tokens=THOUGHT_TOKENS,
            temperature=0.9,
            logprobs=0,
            seed=seed + level,
        )
        found = []
        for branch, output in zip(front, outputs, strict=True):
            tree.prompt_tokens += output.usage["prompt_tokens"]
            tree.cached_tokens += output.usage["prompt_tokens_details"]["cached_tokens"]
            for thought in output.outputs:
                chances = thought.logprobs["token_logprobs"]
                length = len(branch.token_ids) - len(first.prompt_token_ids) + len(chances)
                total = branch.score * (length - len(chances)) + sum(chances)
                ids = [*branch.token_ids, *thought.token_ids]
                found.append(Branch(ids, branch.text + thought.text, total / max(1, length)))
        front = sorted(found, key=lambda each: each.score, reverse=True)[:kept]
    tree.best = front[0]
    return tree


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "builtin") as llm:
        tree = grow(llm, QUESTION)
    print(QUESTION + tree.best.text)
    print(f"{tree.cached_tokens} of {tree.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
