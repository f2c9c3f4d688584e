"""Cost of a step by what it computes, fitted from recorded times."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..step import StepPlan

TERMS: Final = 4


class WorkTerms:
    """Sums of what steps computed: their number, tokens of prompts, rows of one token, and tokens of KV that
    were read.
    """

    __slots__ = ("terms",)

    def __init__(self, terms: Sequence[float] = (0.0,) * TERMS) -> None:
        self.terms = list(terms)

    def add(self, plan: StepPlan) -> None:
        if not plan.rows:
            return
        terms = self.terms
        terms[0] += 1
        for row in plan.rows:
            terms[1 if row.num_tokens > 1 else 2] += row.num_tokens
            terms[3] += row.end

    def copy(self) -> "WorkTerms":
        return WorkTerms(self.terms)

    def since(self, earlier: "WorkTerms") -> list[float]:
        """Return the work that has been added since."""
        return [now - then for now, then in zip(self.terms, earlier.terms, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepCost:
    """Seconds of a step, linear in its work."""

    step_s: float
    prompt_token_s: float
    row_s: float
    kv_token_s: float
    error: float = 0.0
    """Mean absolute error over the recorded times between two arrivals or ends, as a share of them."""
    intervals: int = 0
    """Number of these times that it was fitted from."""

    def seconds(self, plan: StepPlan) -> float:
        """Return what a step takes; nothing for an empty one."""
        work = WorkTerms()
        work.add(plan)
        steps, prompts, rows, kv = work.terms
        return steps * self.step_s + prompts * self.prompt_token_s + rows * self.row_s + kv * self.kv_token_s


def fit_cost(samples: Sequence[tuple[Sequence[float], float]]) -> LinearStepCost:
    """Fit the cost to (work, seconds) by least squares; no term is negative. Without a sample of any step a
    step takes a millisecond.
    """
    used = [(work, seconds) for work, seconds in samples if work[0] > 0]
    if not used:
        return LinearStepCost(step_s=0.001, prompt_token_s=0.0, row_s=0.0, kv_token_s=0.0)
    kept = [term for term in range(TERMS) if any(work[term] for work, _ in used)]
    while True:
        found = _solve(used, kept)
        if (found is not None and (not found or min(found) >= 0)) or len(kept) == 1:
            break
        # The most negative term explains least; a singular system has a term too many.
        worst = len(kept) - 1 if found is None else found.index(min(found))
        kept.pop(worst)
    if found is None or min(found) < 0:
        kept, found = [0], [sum(seconds for _, seconds in used) / sum(work[0] for work, _ in used)]
    terms = [0.0] * TERMS
    for term, value in zip(kept, found, strict=True):
        terms[term] = value
    wrong = sum(abs(sum(a * b for a, b in zip(terms, work, strict=True)) - took) for work, took in used)
    total = sum(took for _, took in used)
    return LinearStepCost(
        step_s=terms[0],
        prompt_token_s=terms[1],
        row_s=terms[2],
        kv_token_s=terms[3],
        error=wrong / total if total > 0 else 0.0,
        intervals=len(used),
    )


def _solve(samples: Sequence[tuple[Sequence[float], float]], kept: list[int]) -> list[float] | None:
    """Solve the normal equations of some terms, by elimination. None: they are singular."""
    scale = [max(work[term] for work, _ in samples) or 1.0 for term in kept]
    size = len(kept)
    rows = [[0.0] * (size + 1) for _ in range(size)]
    for work, seconds in samples:
        scaled = [work[term] / each for term, each in zip(kept, scale, strict=True)]
        for place, value in enumerate(scaled):
            for other in range(size):
                rows[place][other] += value * scaled[other]
            rows[place][size] += value * seconds
    for place in range(size):
        best = max(range(place, size), key=lambda row: abs(rows[row][place]))
        rows[place], rows[best] = rows[best], rows[place]
        pivot = rows[place][place]
        if abs(pivot) < 1e-9 * len(samples) or pivot == 0.0:
            return None
        for row in range(size):
            if row != place:
                factor = rows[row][place] / pivot
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[place], strict=True)]
    return [rows[place][size] / rows[place][place] / scale[place] for place in range(size)]
