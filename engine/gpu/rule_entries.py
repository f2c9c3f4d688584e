"""What a request's rules touch, as a list for the device: each id once, with all that is said of it."""

from array import array
from collections import Counter
from dataclasses import dataclass

from llmbox.kernels.rows import COUNTS, FORBIDDEN, FORBIDDEN_EARLY, ONLY_LISTED

from ..request import Request

NEVER_SEEN = -1


@dataclass(frozen=True, slots=True)
class Entries:
    """As `kernels.rows.RuleRows` has it, of one row."""

    ids: "array[int]"
    counts: "array[int]"
    flags: "array[int]"
    biases: "array[float]"
    kind: int
    until: int

    def __len__(self) -> int:
        return len(self.ids)


def entries_of(request: Request, vocab_size: int) -> Entries:
    """Of the tokens that are known. Ids outside the vocabulary are dropped."""
    params = request.params
    touched = _counted(request)
    bias = {i: value for i, value in params.logit_bias.items() if 0 <= i < vocab_size}
    words = [word for word in params.bad_words if word and 0 <= word[-1] < vocab_size]
    early = {i for i in params.stop_token_ids if 0 <= i < vocab_size} if params.min_tokens else set()
    forbidden = {word[0] for word in words if len(word) == 1}
    for i in (*bias, *early, *(word[-1] for word in words)):
        touched.setdefault(i, NEVER_SEEN)
    kind = COUNTS if params.penalises else 0
    if params.allowed_token_ids is not None:
        kind |= ONLY_LISTED
        allowed = (i for i in params.allowed_token_ids if 0 <= i < vocab_size)
        touched = {i: touched.get(i, NEVER_SEEN) for i in allowed}
    return Entries(
        ids=array("i", touched),
        counts=array("i", touched.values()),
        flags=array("i", (FORBIDDEN * (i in forbidden) | FORBIDDEN_EARLY * (i in early) for i in touched)),
        biases=array("f", (bias.get(i, 0.0) for i in touched)),
        kind=kind,
        until=request.num_prompt + params.min_tokens,
    )


def _counted(request: Request) -> dict[int, int]:
    """Prompt ids, with count 0, only where the repetition penalty needs them."""
    params = request.params
    if not params.penalises:
        return {}
    counts = dict.fromkeys(request.prompt_ids, 0) if params.repetition_penalty != 1.0 else {}
    counts.update(Counter(request.token_ids[request.num_prompt :]))
    return counts


def words_of(request: Request, vocab_size: int) -> list[tuple[int, int]]:
    """(last token, id that must not come after it) of bad words longer than one id, as far as the tokens
    known here match; -1: the last token is known, and matches.
    """
    tokens, found = request.token_ids, []
    for word in request.params.bad_words:
        if len(word) < 2 or not 0 <= word[-1] < vocab_size:
            continue
        known = word[:-2] if request.num_unknown else word[:-1]
        if word[-2] >= 0 and (not known or tuple(tokens[-len(known) :]) == known):
            found.append((word[-2] if request.num_unknown else -1, word[-1]))
    return found
