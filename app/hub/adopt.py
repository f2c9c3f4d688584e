"""Finding models in folders that others filled: further caches, single folders, trees of folders."""

from dataclasses import dataclass
from pathlib import Path

from ..catalog import not_a_folder
from ..errors import CliError, Exit


@dataclass(frozen=True, slots=True)
class Adoptable:
    name: str
    path: Path
    is_cache: bool


def find_adoptable(place: Path) -> list[Adoptable]:
    """Raises CliError (exit 4) when there is nothing that could be served."""
    folder = place.expanduser().resolve()
    if not folder.exists():
        raise CliError(f"no directory {folder}", "it does not exist", "name a folder", Exit.NOT_FOUND)
    if not folder.is_dir():
        raise not_a_folder(folder)
    if _is_model(folder):
        return [Adoptable(folder.name, folder, is_cache=False)]
    for cache in (folder, folder / "hub"):
        if any(path.is_dir() for path in cache.glob("models--*--*")):
            return [Adoptable(str(cache), cache, is_cache=True)]
    found = [
        Adoptable(path.relative_to(folder).as_posix(), path, is_cache=False)
        for pattern in ("*", "*/*")
        for path in sorted(folder.glob(pattern))
        if _is_model(path)
    ]
    if found:
        return found
    other = next((kind for kind in ("*.gguf", "*/*.gguf", "*/*/*.gguf") if any(folder.glob(kind))), None)
    why = "no config.json with *.safetensors in it or below it"
    raise CliError(
        f"{folder} holds no model that can be served",
        why + ("; of GGUF files `llmbox import FILE` makes such a folder" if other else ""),
        "name a Hugging Face cache, or a folder with config.json, *.safetensors and tokenizer.json",
        Exit.NOT_FOUND,
    )


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
