"""Names of models as Ollama's clients write them."""

_HUBS = ("hf.co/", "huggingface.co/")
_TAG = ":latest"


def our_name(name: str) -> str:
    """Without what says where it comes from, and without the tag that stands for none."""
    for hub in _HUBS:
        name = name.removeprefix(hub)
    return name.removesuffix(_TAG)
