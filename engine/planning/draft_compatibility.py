"""Check that a model can propose tokens of another one: kind of layers, and vocabulary."""

from pathlib import Path
from typing import Any, Final

from ..checkpoint.files import MAX_BYTES, read_json, read_regular
from ..errors import ModelError
from ..model_config.config import ModelConfig

_VOCABULARY_FILES: Final = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json")
"""Files that a vocabulary is read from, in the order of precedence."""


def require_draft_for(
    target: ModelConfig, target_directory: Path, draft: ModelConfig, directory: Path
) -> None:
    """Raise ModelError if the model in `directory` cannot propose tokens of the target."""
    if draft.is_bidirectional or target.is_bidirectional:
        raise ModelError("a draft model and its target write text: models of embeddings and rankings do not")
    if draft.recurrent is not None or draft.sliding_heads is not None or draft.layer_sizes:
        raise ModelError(
            f"the draft model {directory} has recurrent layers or layers of several sizes, which a draft "
            "model must not have: choose another with --draft"
        )
    if draft.latent is not None:
        raise ModelError(
            f"the draft model {directory} has latent attention, which draft models must not have: choose "
            "another with --draft"
        )
    if (difference := _vocabulary_difference(target_directory, directory)) is not None:
        raise ModelError(
            f"the draft model {directory} has another vocabulary than {target_directory} ({difference}): a "
            "draft must be of the same family, such as a smaller size of the same model"
        )


def _vocabulary_difference(target: Path, draft: Path) -> str | None:
    """Return how the vocabularies differ, or None."""
    for name in _VOCABULARY_FILES:
        ours, theirs = (each / name for each in (target, draft))
        if not ours.is_file() or not theirs.is_file():
            continue
        if not name.endswith(".json"):
            same = read_regular(ours, MAX_BYTES) == read_regular(theirs, MAX_BYTES)
            return None if same else f"{name} differs"
        return _token_difference(_tokens(read_json(ours)), _tokens(read_json(theirs)))
    return "they have no tokenizer file in common"


def _tokens(vocabulary: dict[str, Any]) -> dict[int, Any]:
    """Return what each id stands for. Raises ModelError."""
    try:
        if "config" in vocabulary:  # tekken.json
            return {each["rank"]: each["token_bytes"] for each in vocabulary["vocab"]}
        tokens = vocabulary.get("model", {}).get("vocab", vocabulary)
        pairs = enumerate(each[0] for each in tokens) if isinstance(tokens, list) else None
        found = dict(pairs or ((number, text) for text, number in tokens.items()))
        return found | {each["id"]: each["content"] for each in vocabulary.get("added_tokens", ())}
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ModelError(f"the vocabulary of the draft model cannot be compared: {error!r}") from None


def _token_difference(ours: dict[int, Any], theirs: dict[int, Any]) -> str | None:
    common = ours.keys() & theirs.keys()
    if len(common) < max(len(ours), len(theirs)) * 0.99:
        return f"{len(ours)} and {len(theirs)} tokens"
    different = [number for number in common if ours[number] != theirs[number]]
    if not different:
        return None
    first = min(different)
    return f"{len(different)} tokens differ, id {first} is {ours[first]!r} and {theirs[first]!r}"
