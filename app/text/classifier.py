"""Class probabilities of classification models (`...ForSequenceClassification`), which have one row of
weights for each class.
"""

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from llmbox.engine.checkpoint.rows import count_rows, read_row

from ..errors import ApiError
from ..models.catalog import read_config

MOST_CLASSES: Final = 1000


@dataclass(frozen=True, slots=True)
class Classifier:
    labels: Sequence[str]
    rows: Sequence[Sequence[float]]
    """Empty for an encoder, whose head has run in the engine."""
    is_exclusive: bool
    """One class a text, by softmax; otherwise each class by its own sigmoid."""

    def probabilities(self, pooled: bytes) -> list[float]:
        """Return the probability of each class. `pooled`: the last hidden state, or an encoder's logits,
        little-endian float32.
        """
        states = array("f", pooled)
        if sys.byteorder == "big":
            states.byteswap()
        logits = [math.fsum(map(float.__mul__, states, row)) for row in self.rows] or list(states)
        if not self.is_exclusive:
            return [_sigmoid(logit) for logit in logits]
        highest = max(logits)
        powers = [math.exp(logit - highest) for logit in logits]
        total = math.fsum(powers)
        return [power / total for power in powers]


@lru_cache(maxsize=16)
def read_classifier(folder: Path, loaded_at: float, labels: int = 0) -> Classifier | None:  # noqa: ARG001
    """Read the classification head from a model's files, once each time it is loaded; None for a model
    without classes. `labels`: those of a head that runs in the engine. Raises ModelError.
    """
    count = labels or count_rows(folder, "score")
    if not 0 < count <= MOST_CLASSES:
        return None
    config = read_config(folder)
    is_exclusive = count > 1 and config.get("problem_type") != "multi_label_classification"
    rows = [] if labels else [read_row(folder, "score", i) for i in range(count)]
    return Classifier(_labels(config, count), rows, is_exclusive)


def not_a_classifier() -> ApiError:
    return ApiError(
        400,
        "This model cannot classify texts: it has no row of scores for each class. Models whose config names "
        "...ForSequenceClassification have. For scores of documents there is /v1/rerank, for vectors "
        "/v1/embeddings.",
        code="classification_not_supported",
        param="model",
    )


def _labels(config: dict[str, Any], count: int) -> list[str]:
    names = config.get("id2label")
    names = names if isinstance(names, dict) else {}
    return [str(names.get(str(i), f"LABEL_{i}")) for i in range(count)]


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
