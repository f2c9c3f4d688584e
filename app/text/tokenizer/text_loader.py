"""Loader of the text side of a model: tokenizer, chat template, end tokens and generation defaults from its
files. A cache of what was loaded, as parsing a tokenizer takes up to half a second of a processor.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from llmbox.engine.checkpoint.files import MAX_BYTES, parse_json, read_regular
from llmbox.engine.errors import ModelError
from llmbox.engine.hardware.proc import trim_heap
from llmbox.engine.model_config.vision.families import find_vision

from ..chat_template import ControlTokens, named_special_tokens, pick_template
from ..output.format_table import recognize_format
from .detokenizer import TokenBytes
from .sandboxed_encoder import SandboxedEncoder
from .text_encoder import TextEncoder, load_tokenizer
from .tokenizer import TextModel
from .tokenizer_builder import build_source, find_source
from .tokenizer_safety import find_unsafe_part, find_unsafe_step

log = logging.getLogger("llmbox.text")

_DEFAULT_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (1e-9, 1),
    "top_k": (0, 1 << 30),
    "min_p": (0, 1),
    "repetition_penalty": (1e-9, 2),
}
END_OF_TURN: Final = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "<end_of_turn>",
    "<|endofturn|>", "<|eot|>", "<|return|>", "<|call|>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "[e~[",
)  # fmt: skip
"""Turn ends that models emit although their configs may not list them; taken if the template writes them."""
MOST: Final = 64
"""Each request carries them all. No known model declares more than a handful."""
KEPT: Final = 2
"""Most models that are kept without being in memory. Each takes some 60 MB with 150,000 tokens."""

Stamp = tuple[tuple[str, int, int, int], ...]


def load_model_text(path: Path) -> TextModel:
    """Load the text side of a model. Raises ModelError naming the file that is missing or broken."""
    text = _load(path)
    trim_heap()  # frees the file and its parsed form
    return text


def _load(path: Path) -> TextModel:
    tokenizer, encoder = _load_tokenizer(path)
    decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
    config = _read_json(path / "tokenizer_config.json")
    generation = _read_json(path / "generation_config.json")
    special_tokens = named_special_tokens(
        _read_json(path / "special_tokens_map.json")
    ) | named_special_tokens(config)
    template = _template(path, config)
    tool_template = _template(path, config, "tool_use")
    configs = {"config.json": _read_json(path / "config.json"), "generation_config.json": generation}
    declared, warnings = declared_ids(configs)
    return TextModel(
        tokenizer=tokenizer,
        encoder=encoder,
        tokens=TokenBytes(tokenizer, decoder),
        control=ControlTokens(tokenizer, frozenset(special_tokens.values())),
        special_tokens=special_tokens,
        chat_template=template,
        vision=find_vision(path)[0],
        tool_template=tool_template,
        eos_token_ids=end_token_ids(tokenizer, special_tokens, template, declared),
        warnings=tuple(warnings),
        generation_defaults=_generation_defaults(generation),
    )


def _load_tokenizer(folder: Path) -> tuple[Tokenizer, TextEncoder | SandboxedEncoder]:
    """Load the vocabulary and the encoder. Raises ModelError."""
    file = folder / "tokenizer.json"
    is_built = not file.exists() and find_source(folder) is not None
    source = build_source(folder) if is_built else _read_bytes(file)
    unsafe = find_unsafe_step(source)
    encoder: TextEncoder | SandboxedEncoder | None = None
    if unsafe:
        log.info("%s: texts are tokenized in a process of its own, for %s", file, unsafe)
        encoder = SandboxedEncoder.of_source(source) if is_built else SandboxedEncoder(file)
    try:
        if unsafe:
            source = _strip_steps(source)
        tokenizer = load_tokenizer(source)
    except ValueError as error:
        raise ModelError(f"tokenizer.json is not a tokenizer: {error}") from None
    if encoder is None and find_unsafe_part(tokenizer):  # a repeated key is read in two ways
        raise ModelError("tokenizer.json is ambiguous: the library reads other steps in it")
    return tokenizer, encoder or TextEncoder(tokenizer)


def _strip_steps(source: bytes) -> bytes:
    """Keep only the mapping of tokens and ids: no step that works on a text stays. Raises ValueError."""
    file = parse_json(source)
    if not isinstance(file, dict):
        raise ValueError("it does not contain a JSON object")  # noqa: TRY004 - of a file, not of an argument
    return json.dumps({**file, "normalizer": None, "pre_tokenizer": None, "post_processor": None}).encode()


def read_template(path: Path) -> str | None:
    """Read the chat template of a model that is not loaded. Raises ModelError."""
    return _template(path, _read_json(path / "tokenizer_config.json"))


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """Read tokenizer_config.json as its author wrote it; empty where there is none. Raises ModelError."""
    return _read_json(path / "tokenizer_config.json")


def read_generation_defaults(path: Path) -> dict[str, float]:
    """Read the generation defaults of a model that is not loaded. Raises ModelError."""
    return _generation_defaults(_read_json(path / "generation_config.json"))


def _template(path: Path, config: dict[str, Any], name: str = "default") -> str | None:
    """Read the template of this name, as transformers finds it."""
    files = [path / "additional_chat_templates" / f"{name}.jinja"]
    if name == "default":
        files.insert(0, path / "chat_template.jinja")
    for file in files:
        if file.exists():
            return _read_text(file)
    given = _read_json(path / "chat_template.json").get("chat_template", config.get("chat_template"))
    return pick_template(given, name)


def _generation_defaults(config: dict[str, Any]) -> dict[str, float]:
    # `do_sample: false` is how a model says "greedy"; its other numbers then mean nothing.
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    return {
        name: config[name]
        for name, (low, high) in _DEFAULT_RANGES.items()
        if isinstance(config.get(name), int | float) and low <= config[name] <= high
    }


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. An absent file is an empty object: only tokenizer.json is needed."""
    if not path.exists():
        return {}
    try:
        value = parse_json(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must hold a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path, MAX_BYTES)
    except FileNotFoundError:
        raise ModelError(
            f"{path.name} is missing in the model's directory: there is no tokenizer to read text with. "
            "Download the model again. tekken.json, tokenizer.model, or vocab.json and merges.txt work too."
        ) from None
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror or error}") from None


def declared_ids(configs: Mapping[str, dict[str, Any]]) -> tuple[list[int], list[str]]:
    """Return the `eos_token_id` values of all files, and a warning for each that is not a token id. Raises
    ModelError.
    """
    ids: list[int] = []
    warnings: list[str] = []
    for file, config in configs.items():
        declared = config.get("eos_token_id")
        listed = declared if isinstance(declared, list) else [] if declared is None else [declared]
        if len(listed) > MOST:
            raise ModelError(f"{file}: eos_token_id lists {len(listed)} ids, at most {MOST} are allowed")
        for value in listed:
            if type(value) is int and 0 <= value < 2**31:
                ids.append(value)
            else:
                warnings.append(f"{file}: eos_token_id {str(value)[:40]} is not a token id and is ignored")
    return ids, warnings


def end_token_ids(
    tokenizer: Tokenizer, special_tokens: Mapping[str, str], template: str | None, declared: Sequence[int]
) -> tuple[int, ...]:
    """Return every id that ends an answer, in a fixed order: declared ones, the named one, those of the
    template.
    """
    names = [special_tokens.get("eos_token", "")]
    harmony = recognize_format(template).is_harmony  # there `<|end|>` ends a message, not the turn
    names += [
        name for name in END_OF_TURN if template and name in template and not (harmony and name == "<|end|>")
    ]
    named = (tokenizer.token_to_id(name) for name in names)
    return tuple(dict.fromkeys((*declared, *(id_ for id_ in named if id_ is not None))))


class TextCache:
    """Text models by folder: those in use, and of the others the last `KEPT`.

    `load` and `release` are called from one event loop or from its threads. A model is loaded anew when a
    file in its folder has changed, and when texts are encoded in a separate process.
    """

    def __init__(self, load: Callable[[Path], TextModel] = load_model_text) -> None:
        self._load = load
        self._made: dict[Path, tuple[Stamp, TextModel]] = {}
        self._unused: dict[Path, None] = {}
        """Folders of the kept ones, the oldest first."""

    def load(self, folder: Path) -> TextModel:
        """Return the text model of a folder until `release`. Raises ModelError."""
        self._unused.pop(folder, None)
        stamp = read_stamp(folder)
        made = self._made.get(folder)
        if made is not None and made[0] == stamp:
            return made[1]
        text = self._load(folder)
        if not isinstance(text.encoder, SandboxedEncoder):
            self._made[folder] = stamp, text
        return text

    def release(self, folder: Path) -> list[TextModel]:
        """Keep a model that is used no more. Returns those that are kept no longer: to free one takes tens of
        milliseconds, so the caller may choose when.
        """
        if folder in self._made:
            self._unused.pop(folder, None)
            self._unused[folder] = None
        return [self._forget(oldest) for oldest in list(self._unused)[:-KEPT]]

    def clear(self) -> list[TextModel]:
        """Keep none that is not used. Returns them."""
        return [self._forget(folder) for folder in list(self._unused)]

    def _forget(self, folder: Path) -> TextModel:
        del self._unused[folder]
        return self._made.pop(folder)[1]


def read_stamp(folder: Path) -> Stamp:
    """Return names, sizes, times and inodes of the files of a folder; empty where it cannot be read."""
    return tuple(sorted(_read_files(folder)))


def _read_files(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    for pattern in ("*", "additional_chat_templates/*"):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # removed meanwhile, or a link to nothing
                status = path.stat()
                yield str(path), status.st_size, status.st_mtime_ns, status.st_ino
