"""Writes perplexity.txt: the held-out questions with their right answers, one conversation a paragraph.

A fixed text to measure a model on before and after quantisation; no question of it is in the training data.
"""

from pathlib import Path

from questions import HELD_OUT, load_facts, load_toml

OUT = Path(__file__).with_name("perplexity.txt")


def main() -> None:
    facts, groups = load_facts(), load_toml(HELD_OUT)
    by_id = {topic.id: topic.answer for topic in facts.topics}
    pairs = [(q["ask"], _answer(q, by_id)) for q in groups["in_scope"]["questions"]]
    pairs += [(q, facts.out_of_scope["answer"]) for q in groups["out_of_scope"]["questions"]]
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    OUT.write_text("\n".join(turn.format(*pair) for pair in pairs), encoding="utf-8")


def _answer(question: dict[str, str | list[str]], by_id: dict[str, str]) -> str:
    if "topic" in question:
        return by_id[str(question["topic"])]
    right = [
        a
        for a in by_id.values()
        if all(any(o.lower() in a.lower() for o in m.split("|")) for m in question["must"])
    ]
    if len(right) != 1:
        raise SystemExit(f"{question['ask']}: {len(right)} answers fit, name the topic")
    return right[0]


if __name__ == "__main__":
    main()
