"""Turns the written facts in data/ into training conversations: templates, then noise that users bring."""

import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wording import DROPPABLE, FILLERS, FRAMES, SWAPS, gerund

DATA = Path(__file__).parent / "data"
HELD_OUT = Path(__file__).parents[2] / "tests" / "packaging" / "builtin_questions.toml"

# Question tokens teach the model what questions look like; the answers are what it is for.
QUESTION_WEIGHT = 0.1

OUT_OF_SCOPE_SHARE = 0.22
SYSTEM_SHARE = 0.2
MORE_TURNS_SHARE = 0.25
RAW_TEXT_SHARE = 0.05
# An answer is learned after a few dozen readings, and its first words decide which it is: most of the time
# reading on would only cost time that more questions need.
CUT_SHARE = 0.6
CUT_CHARACTERS = 50

# How much more often changed topics are drawn when a run begins with weights that know the others.
OFTEN = 4

_CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Topic:
    id: str
    answer: str
    concept: tuple[str, ...]
    task: tuple[str, ...]
    ask: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    topics: tuple[Topic, ...]
    templates: dict[str, list[str]]
    out_of_scope: dict[str, Any]


def load_facts() -> Facts:
    topics: list[Topic] = []
    for name in ("product", "concepts", "smalltalk"):
        for raw in load_toml(DATA / f"{name}.toml")["topic"]:
            kinds = {kind: tuple(raw.get(kind, ())) for kind in ("concept", "task", "ask")}
            topics.append(Topic(id=raw["id"], answer=raw["answer"], **kinds))
    return Facts(tuple(topics), load_toml(DATA / "templates.toml"), load_toml(DATA / "out_of_scope.toml"))


def held_out() -> list[str]:
    groups = load_toml(HELD_OUT)
    return [q["ask"] for q in groups["in_scope"]["questions"]] + groups["out_of_scope"]["questions"]


def normalise(question: str) -> str:
    """Two questions with one normal form are the same question: no case, no punctuation, single spaces."""
    return " ".join(re.sub(r"[^\w\s]", " ", question.lower()).split())


class Writer:
    """Draws training texts. One seed, one sequence of texts, whatever the machine."""

    def __init__(
        self, facts: Facts, seed: int, forbidden: set[str], often: frozenset[str] = frozenset()
    ) -> None:
        """`often`: ids of topics that are drawn `OFTEN` times as often as the others."""
        self.facts = facts
        self.random = random.Random(seed)
        self.forbidden = forbidden
        unknown = often - {topic.id for topic in facts.topics}
        if unknown:
            raise ValueError(f"no such topics: {', '.join(sorted(unknown))}")
        self._drawn = [t for t in facts.topics for _ in range(OFTEN if t.id in often else 1)]
        self._by_scope = [t for t in facts.topics if t.concept or t.task], facts.topics
        self.questions: set[str] = set()

    def texts(self) -> Iterator[list[tuple[str, float]]]:
        """Endless texts, each a list of (piece, weight of its loss)."""
        while True:
            yield self._raw_text() if self._chance(RAW_TEXT_SHARE) else self._conversation()

    def pair(self) -> tuple[str, str]:
        while True:
            question, answer = self._clean_pair()
            question = self._noise(question)
            # The held-out questions measure generalisation: not one of them may be learned, even by accident.
            if normalise(question) not in self.forbidden:
                self.questions.add(question)
                return question, answer

    def _conversation(self) -> list[tuple[str, float]]:
        pieces: list[tuple[str, float]] = []
        if self._chance(SYSTEM_SHARE):
            content = self.random.choice(self.facts.templates["system"])
            pieces += _message("system", content)
        turns = self.random.choice((2, 2, 3, 4)) if self._chance(MORE_TURNS_SHARE) else 1
        for _ in range(turns):
            question, answer = self.pair()
            pieces += _message("user", question)
            pieces.append(("<|im_start|>assistant\n", 0.0))
            pieces += self._learned(answer)
        return [*pieces, ("<|endoftext|>", 0.0)]

    def _learned(self, answer: str) -> list[tuple[str, float]]:
        if len(answer) > CUT_CHARACTERS and self._chance(CUT_SHARE):
            return [(answer[: answer.rindex(" ", 0, CUT_CHARACTERS)], 1.0)]
        return [(answer + "<|im_end|>", 1.0), ("\n", 0.0)]

    def _raw_text(self) -> list[tuple[str, float]]:
        """What `/v1/completions` meets: no roles, plain paragraphs or question and answer lines."""
        if self._chance(0.5):
            text = " ".join(t.answer for t in self.random.sample(self._by_scope[0], 3))
        else:
            text = "\n".join(f"Question: {q}\nAnswer: {a}" for q, a in (self.pair(), self.pair()))
        return [(text + "<|endoftext|>", 1.0)]

    def _clean_pair(self) -> tuple[str, str]:
        if self._chance(OUT_OF_SCOPE_SHARE):
            return self._frame(self._out_of_scope()), self.facts.out_of_scope["answer"]
        topic = self.random.choice(self._drawn)
        question = self._frame(self._in_scope(topic))
        if (topic.concept or topic.task) and self._chance(0.08):
            question = f"{question} {self.random.choice(self.facts.templates['after_product'])}"
        return question, topic.answer

    def _in_scope(self, topic: Topic) -> str:
        kinds = [kind for kind in ("concept", "task", "ask", "ask") if getattr(topic, kind)]
        kind = self.random.choice(kinds)
        phrase = self._expand(self.random.choice(getattr(topic, kind)))
        return phrase if kind == "ask" else self._template(kind, phrase)

    def _out_of_scope(self) -> str:
        facts = self.facts.out_of_scope
        kind = self.random.choices(("concept", "task", "ask"), (1, 1, 3))[0]
        if kind == "ask":
            return self._fill(self._expand(self.random.choice(facts["ask"])))
        words = facts["nouns" if kind == "concept" else "tasks"]
        phrase = self._word() if self._chance(0.15) else self.random.choice(words)
        return self._template(kind, phrase)

    def _template(self, kind: str, phrase: str) -> str:
        template = self._expand(self.random.choice(self.facts.templates[kind]))
        return template.replace("{x}", phrase).replace("{v}", phrase).replace("{g}", gerund(phrase))

    def _expand(self, pattern: str) -> str:
        text = _CHOICE.sub(lambda m: self.random.choice(m[1].split("|")), pattern)
        return " ".join(text.split())

    def _fill(self, pattern: str) -> str:
        return _SLOT.sub(lambda m: self._slot(m[1]), pattern)

    def _slot(self, name: str) -> str:
        if name == "num":
            return str(self.random.choice((self.random.randint(0, 20), self.random.randint(0, 3000))))
        if name == "word":
            return self._word()
        lists = self.facts.out_of_scope
        # toml keys are plurals: nouns, tasks, countries, people
        key = {"country": "countries", "person": "people"}.get(name, name + "s")
        return str(self.random.choice(lists[key]))

    def _word(self) -> str:
        """A word that means nothing: an unknown word is out of scope, not the nearest known topic."""
        syllables = [
            self.random.choice("bcdfghjklmnprstvwz") + self.random.choice("aeiouy") for _ in range(3)
        ]
        return "".join(syllables[: self.random.randint(2, 3)]) + self.random.choice(
            ("", "n", "r", "st", "l", "k")
        )

    def _frame(self, question: str) -> str:
        templates = self.facts.templates
        if self._chance(0.08):
            question = self.random.choice(FRAMES).format(q=question)
        if self._chance(0.12):
            question = f"{self.random.choice(templates['before'])} {question}"
        if self._chance(0.1):
            question = f"{question} {self.random.choice(templates['after'])}"
        return question

    def _noise(self, question: str) -> str:
        words = question.split()
        if self._chance(0.35):
            words = self._swap(words)
        if self._chance(0.12) and len(words) > 4:
            words = self._drop(words)
        if self._chance(0.1) and len(words) > 3:
            words.insert(self.random.randrange(1, len(words)), self.random.choice(FILLERS))
        if self._chance(0.12):
            at = self.random.randrange(len(words))
            words[at] = self._typo(words[at])
        return self._spelling(" ".join(words))

    def _swap(self, words: list[str]) -> list[str]:
        at = [i for i, word in enumerate(words) if word in SWAPS]
        for i in self.random.sample(at, min(len(at), self.random.randint(1, 2))):
            words[i] = self.random.choice(SWAPS[words[i]])
        return words

    def _drop(self, words: list[str]) -> list[str]:
        at = [i for i, word in enumerate(words) if word in DROPPABLE]
        gone = set(self.random.sample(at, min(len(at), self.random.randint(1, 2))))
        return [word for i, word in enumerate(words) if i not in gone]

    def _typo(self, word: str) -> str:
        if len(word) < 4:
            return word
        i = self.random.randrange(1, len(word) - 1)
        kind = self.random.randrange(4)
        if kind == 0:
            return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
        middle = ("", word[i] * 2, self.random.choice("aeinorst"))[kind - 1]
        return word[:i] + middle + word[i + 1 :]

    def _spelling(self, question: str) -> str:
        """Case and punctuation as people type them."""
        style = self.random.random()
        if style < 0.5:
            question = question[0].upper() + question[1:]
            question = re.sub(r"\bi\b", "I", question)
        elif style < 0.53:
            question = question.upper()
        elif style < 0.56:
            question = question.title()
        question = question.replace(
            "llmbox", self.random.choice(("llmbox",) * 8 + ("LLMbox", "Llmbox", "LLMBox"))
        )
        question = question.replace("do not", self.random.choice(("do not", "don't")))
        return (
            question
            if question[-1] in "?!."
            else question + self.random.choice(("", "", "?", "?", "?", ".", "!", " ?"))
        )

    def _chance(self, share: float) -> bool:
        return self.random.random() < share


def _message(role: str, content: str) -> list[tuple[str, float]]:
    # The mark has no weight: what follows a cut answer is not what follows the words of that answer.
    return [("<|im_start|>", 0.0), (f"{role}\n{content}<|im_end|>\n", QUESTION_WEIGHT)]


def load_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
