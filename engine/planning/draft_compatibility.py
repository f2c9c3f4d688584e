"""Check that a model or a draft head can propose tokens of a target: layers, widths and vocabulary."""

from pathlib import Path
from typing import Any, Final

from ..checkpoint.files import MAX_BYTES, read_json, read_regular
from ..checkpoint.index import list_tensors
from ..config import EngineConfig
from ..errors import ModelError
from ..model_config.config import ModelConfig, parse_config
from ..model_config.draft_heads import DraftHeadConfig, Eagle3Config, read_draft_head

_VOCABULARY_FILES: Final = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocab.json")
"""Files that a vocabulary is read from, in the order of precedence."""


def check_drafts(target: ModelConfig, config: EngineConfig) -> None:
    """Raise ModelError if what `config` asks for cannot propose tokens of the target."""
    if config.mtp == "on" and target.mtp is None:
        raise ModelError(
            f"{config.model_path} has no layer for multi-token prediction that is known here: load without "
            "--draft mtp"
        )
    if config.draft_path is None:
        return
    directory = Path(config.draft_path)
    head = read_draft_head(directory)
    if head is None:
        require_draft_for(target, Path(config.model_path), parse_config(directory), directory)
    else:
        require_head_for(target, Path(config.model_path), head)


def require_head_for(target: ModelConfig, target_directory: Path, head: DraftHeadConfig) -> None:
    """Raise ModelError if a draft head was not made for the target."""
    directory, what = head.directory, "the Medusa heads"
    hidden, vocab, layers = target.hidden_size, target.vocab_size, target.num_layers
    if target.is_bidirectional or target.altup is not None:
        raise ModelError(f"{target_directory} cannot have draft heads: load it without --draft")
    widths = [("hidden states of {} numbers", head.shape().hidden, hidden)]
    if isinstance(head, Eagle3Config):
        what = "the EAGLE-3 head"
        widths += [("hidden states of {} numbers", head.target_hidden, hidden)]
        widths += [("a vocabulary of {} tokens", head.layer.vocab_size, vocab)]
        taps = head.taps(layers)
        if not all(0 < layer < layers for layer in taps):
            raise ModelError(
                f"{what} {directory} reads layers {', '.join(map(str, taps))} of its target, but "
                f"{target_directory} has {layers}: choose the head of this model with --draft"
            )
    else:
        widths += [("a vocabulary of {} tokens", head.vocab, vocab)]
    for text, own, wanted in widths:
        if own != wanted:
            raise ModelError(
                f"{what} {directory} was made for {text.format(own)}, but {target_directory} has {wanted}: "
                "choose the head of this model with --draft"
            )
    if isinstance(head, Eagle3Config):
        _check_eagle3_tensors(head)


def _check_eagle3_tensors(head: Eagle3Config) -> None:
    """Raise ModelError if tensors that decide what the head reads and proposes have other shapes."""
    tensors = {name.removeprefix("model."): each for name, each in list_tensors(head.directory).items()}
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (head.layer.hidden_size, 3 * head.target_hidden),
        "lm_head.weight": (head.vocab, head.layer.hidden_size),
    }
    if head.vocab != head.layer.vocab_size or "d2t" in tensors:
        wanted["d2t"] = (head.vocab,)
    for name, shape in wanted.items():
        found = tensors.get(name)
        if found is None or found.shape != shape:
            problem = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise ModelError(
                f"{head.directory}: tensor {name} of the EAGLE-3 head {problem}, config.json asks for "
                f"{list(shape)}: fetch the head again"
            )


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
