"""Scores from single rows of weights: documents ranked for a query, and probabilities of classes.

A classification model (`...ForSequenceClassification` with one label) multiplies its last hidden state with
one row of weights; an encoder (BERT and its kin) reads query and document as a pair, and its head runs in
the engine. A generative model answers a question, and the logits of "yes" and "no" are compared,
which are the last hidden state times two rows of its head. Clients get the sigmoid of the score, or of the
difference: between "yes" and "no" that is the probability of "yes". Question and answer are those of
Qwen3-Reranker (Zhang et al., "Qwen3 Embedding", 2025), in the format of the model's own chat template.
"""

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from llmbox.engine.checkpoint.index import count_rows, read_row
from llmbox.engine.ipc.profile_messages import AskRows, WeightRows
from llmbox.engine.model_config.config import ModelConfig, parse_config
from llmbox.kernels.quant_formats import QUANTS

from ..errors import ApiError, unavailable
from ..models.catalog import read_config
from ..models.gguf_folders import head_rows, score_rows, weights_of
from ..sandbox.pool import TemplatePool, job
from .tokenizer.text_encoder import SpecialTokenMarkers
from .tokenizer.tokenizer import TextModel

SYSTEM: Final = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS: Final = ("yes", "no")


@dataclass(frozen=True, slots=True)
class Reranker:
    rows: Sequence[Sequence[float]]
    """Weights for the last hidden state of a text: the classifier's row, or the head's rows of "yes" and
    "no". Empty for an encoder, whose head has run in the engine.
    """
    scale: float = 1.0
    """Logit scale, applied first; then the logit softcap: cap * tanh(x / cap)."""
    cap: float | None = None

    def score(self, pooled: bytes) -> float:
        """Return the relevance from 0 to 1. `pooled`: the last hidden state, or the logit that an encoder
        gave, little-endian float32.
        """
        logits = [self._capped(self.scale * product) for product in _products(pooled, self.rows)]
        return _sigmoid(logits[0] - sum(logits[1:]))

    def _capped(self, logit: float) -> float:
        return logit if self.cap is None else self.cap * math.tanh(logit / self.cap)


def answer_ids(text: TextModel) -> tuple[int, int] | None:
    """Return the tokens of "yes" and "no"; None unless each is one token."""
    found = [text.encode(answer, add_special_tokens=False) for answer in ANSWERS]
    if any(len(ids) != 1 for ids in found):
        return None
    (yes,), (no,) = found
    return yes, no


@lru_cache(maxsize=16)
def read_reranker(folder: Path, loaded_at: float, answers: tuple[int, int] | None) -> Reranker:  # noqa: ARG001
    """Read a reranker from a model's files, once each time it is loaded. Raises ApiError 400 and
    ModelError.
    """
    labels = count_rows(folder, "score")
    if labels > 1:
        raise not_a_reranker(f"it sorts texts into {labels} classes and gives no score")
    if labels == 1:
        return Reranker([read_row(folder, "score", 0)])
    config = parse_config(folder)
    answers = _checked(config, answers)
    name = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    quant = None if config.quant is None or QUANTS[config.quant].keeps_head else QUANTS[config.quant].head
    rows, scales = [read_row(folder, name, token, quant) for token in answers], config.scales
    return Reranker(rows, scales.logits, scales.logits_cap)


def _checked(config: ModelConfig, answers: tuple[int, int] | None) -> tuple[int, int]:
    if not config.has_head:
        raise not_a_reranker("it has neither a head nor a row of scores")
    if answers is None:
        raise not_a_reranker("'yes' and 'no' are not tokens of its vocabulary")
    return answers


@lru_cache(maxsize=16)
def rows_of_gguf(folder: Path, loaded_at: float, answers: tuple[int, int] | None) -> AskRows | None:  # noqa: ARG001
    """Return the rows of weights that a decoder in a GGUF file ranks with, which only its engine can
    dequantize; None for other models. Raises ApiError 400 and ModelError.
    """
    if weights_of(folder) == folder.resolve():
        return None
    labels = read_config(folder).get("id2label")
    if isinstance(labels, dict):
        order = sorted(labels, key=lambda idx: (labels[idx] == "no", idx))
        return score_rows(folder, tuple(map(int, order)))
    config = parse_config(folder)
    return head_rows(folder, _checked(config, answers), is_tied=config.tie_word_embeddings)


def reranker_of(folder: Path, found: WeightRows | None) -> Reranker:
    """Return the reranker that has these rows. Raises ApiError 400, and 503 if the engine did not answer."""
    rows = _answered(found)
    if not rows:
        raise not_a_reranker("the rows of its head cannot be read from its file")
    scales = parse_config(folder).scales
    return Reranker(rows, scales.logits, scales.logits_cap)


def _answered(found: WeightRows | None) -> list[list[float]]:
    """Return the rows that the engine read. Raises ApiError 503 if it did not answer."""
    if found is None:
        raise unavailable(
            "The engine did not return the weights for scoring: it is busy or restarting.",
            "engine_busy",
            retry_after=1,
        )
    return found.rows


def not_a_reranker(why: str) -> ApiError:
    return ApiError(
        400,
        f"This model cannot rank documents: {why}. Rerankers such as Qwen3-Reranker can, and chat models "
        "less well.",
        code="rerank_not_supported",
        param="model",
    )


async def build_rerank_prompts(
    pool: TemplatePool, text: TextModel, query: str, documents: Sequence[str], instruction: str | None
) -> list[list[int]]:
    """Build one prompt of token ids for each document. The template is rendered once. Raises ApiError."""
    if text.chat_template is None:
        raise not_a_reranker("it has no chat template for the question")
    asked = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: "
    markers = SpecialTokenMarkers.absent_from("".join((text.chat_template, asked, *documents)))
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": text.control.mark(asked, markers, every=True) + markers.tail},
    ]
    variables: dict[str, Any] = text.special_tokens | {
        "tools": None,
        "documents": None,
        "enable_thinking": False,
    }
    variables |= {"messages": messages, "add_generation_prompt": True}
    before, place, after = (await pool.render(job(text.chat_template, variables))).partition(markers.tail)
    if not place:
        raise not_a_reranker("its chat template omits the messages of users")

    def encode() -> list[list[int]]:
        marked = (text.control.mark(document, markers, every=True) for document in documents)
        return [text.encode_marked(before + document + after, markers) for document in marked]

    return await text.off_loop(sum(map(len, documents)), encode)


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
        logits = _products(pooled, self.rows)
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


@lru_cache(maxsize=16)
def class_rows_of_gguf(folder: Path, loaded_at: float) -> AskRows | None:  # noqa: ARG001
    """Return the rows of scores of a decoder in a GGUF file, which only its engine can dequantize; None for
    other models. Raises ModelError.
    """
    labels = read_config(folder).get("id2label")
    if weights_of(folder) == folder.resolve() or not isinstance(labels, dict):
        return None
    return score_rows(folder, tuple(range(len(labels))))


def classifier_of(folder: Path, found: WeightRows | None) -> Classifier | None:
    """Return the classifier that has these rows; None if its file does not give them. Raises ApiError 503 if
    the engine did not answer.
    """
    rows = _answered(found)
    return Classifier(_labels(read_config(folder), len(rows)), rows, len(rows) > 1) if rows else None


def not_a_classifier() -> ApiError:
    return ApiError(
        400,
        "This model cannot classify texts: it has no row of scores for each class. Models whose config names "
        "...ForSequenceClassification have, and GGUF files with a 'cls.output.weight'. For scores of "
        "documents there is /v1/rerank, for vectors /v1/embeddings.",
        code="classification_not_supported",
        param="model",
    )


def _labels(config: dict[str, Any], count: int) -> list[str]:
    names = config.get("id2label")
    names = names if isinstance(names, dict) else {}
    return [str(names.get(str(i), f"LABEL_{i}")) for i in range(count)]


def _products(pooled: bytes, rows: Sequence[Sequence[float]]) -> list[float]:
    """Multiply a state, little-endian float32, by each row; return the state itself if there is no row."""
    states = array("f", pooled)
    if sys.byteorder == "big":
        states.byteswap()
    return [math.fsum(map(float.__mul__, states, row)) for row in rows] or list(states)


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
