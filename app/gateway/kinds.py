"""Text or vectors: whether a model makes what is asked for, and how much of it at the same time."""

from ..engines.loaded_model import LoadedModel
from ..errors import ApiError
from .generation import Generation


def check_kind(generation: Generation) -> None:
    """Raises ApiError 400 where the model cannot do what is asked."""
    info, name = generation.model.supervisor.info, generation.model.name
    assert info is not None
    if generation.params.pooling is None and not info.generates:
        raise ApiError(
            400,
            f"{name} makes embeddings or scores and no text: send it to /v1/embeddings or /v1/rerank, or "
            "name another model.",
            code="generation_not_supported",
            param="model",
        )


def most_at_once(model: LoadedModel, choices: int, *, pools: bool, queue: int) -> int:
    """How many choices of one request may be with the engine. Thousands of texts may come in one request for
    vectors: the engine has some to go on with, and others are not kept waiting behind all of them.

    `queue`: requests that may wait for a model.
    """
    if not pools:
        return choices
    info = model.supervisor.info
    assert info is not None
    return min(choices, info.max_running + min(info.max_running, queue))
