"""Checkpoints of a transformer without its head, as models that make vectors are often stored. No torch.

They are loaded as if the head were the embedding: nobody uses it, and it takes no memory.
"""

from pathlib import Path

from .checkpoint import list_tensors
from .config_fields import Fields
from .errors import ModelError
from .pooling_config import is_declared

HEAD = "lm_head.weight"
_BACKBONE, _WHOLE = "Model", "ForCausalLM"


def with_head(architecture: str) -> str:
    """The class that has the head too: `Qwen3ForCausalLM` for `Qwen3Model`."""
    if architecture.endswith(_BACKBONE):
        return architecture.removesuffix(_BACKBONE) + _WHOLE
    return architecture


def has_head(fields: Fields, directory: Path) -> bool:
    """Where only the files tell, a folder that declares no vectors is expected to have one: without it, it is
    damaged.
    """
    named = fields.raw.get("architectures") or []
    names = named if isinstance(named, list) else [named]
    if any(isinstance(name, str) and name.endswith(_BACKBONE) for name in names):
        return False
    if fields.flag("tie_word_embeddings", default=False) or not is_declared(directory):
        return True
    try:
        return HEAD in list_tensors(directory)
    except ModelError:  # loading says why
        return True
