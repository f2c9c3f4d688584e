"""Raw prompts as token ids: texts, ids, and lists of either."""

from typing import Any

from ...engines.loaded_model import LoadedModel
from ...gateway.gateway import model_limit
from .sampling import invalid


def prompt_items(given: Any, param: str) -> list[Any]:
    """Each a text, or a list of ids. Raises ApiError 400."""
    if isinstance(given, str):
        given = [given]
    if not given:
        raise invalid(param, "it must not be empty")
    items: list[Any] = [given] if isinstance(given[0], int) else list(given)
    if len({type(item) for item in (given if isinstance(given[0], int) else items)}) > 1:
        raise invalid(param, "a list holds either texts, or token ids, or lists of token ids")
    return items


def truncated(
    prompts: list[list[int]], most: int | None, max_tokens: int | None, model: LoadedModel
) -> tuple[list[list[int]], list[str]]:
    """The last `most` ids of each (-1: as many as leave room for `max_tokens`), and a warning about the rest.

    Raises ApiError 400 for a length that no prompt may have.
    """
    if most is None:
        return prompts, []
    limit = model_limit(model)
    if most == 0 or most > limit:
        raise invalid("truncate_prompt_tokens", f"it is -1, or 1 to this model's context of {limit} tokens")
    keep = most if most > 0 else limit - max(max_tokens or 1, 1)
    if keep < 1:
        raise invalid("truncate_prompt_tokens", "the output that is asked for leaves no room for a prompt")
    cut = [ids[-keep:] for ids in prompts]
    lost = sum(map(len, prompts)) - sum(map(len, cut))
    where = "The prompt" if len(prompts) == 1 else "Prompts"
    told = f"{where} lost {lost} tokens at the beginning, as 'truncate_prompt_tokens' asks."
    return cut, [told] if lost else []


async def prompt_ids(items: list[Any], param: str, model: LoadedModel, *, special: bool) -> list[list[int]]:
    """Of `prompt_items`. Raises ApiError 400."""

    def encode() -> list[list[int]]:
        return [model.text.encode(i, add_special_tokens=special) if isinstance(i, str) else i for i in items]

    prompts = await model.text.off_loop(sum(map(len, items)), encode)
    check_prompts(prompts, param, model)
    return prompts


def check_prompts(prompts: list[list[int]], param: str, model: LoadedModel) -> None:
    """Raises ApiError 400 where a prompt has no tokens, or one that the model has no embedding for."""
    info = model.supervisor.info
    assert info is not None
    for i, ids in enumerate(prompts):
        place = param if len(prompts) == 1 else f"{param}[{i}]"
        if not ids:
            raise invalid(place, "it makes a prompt of no tokens, and a model needs one token to begin with")
        if max(ids) >= info.vocab_size:
            raise invalid(place, f"token id {max(ids)} is not in the vocabulary of {info.vocab_size}")
