"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors` of a folder.

Parsed and validated without a base model; `engine/weights/adapters.py` compares them with one. No torch.

Hu et al., "LoRA", 2021. Kalajdzievski, "A Rank Stabilization Scaling Factor", 2023 (rsLoRA). Liu et al.,
"DoRA: Weight-Decomposed Low-Rank Adaptation", 2024.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import ModelError
from .files import read_json
from .safetensors import TensorEntry, read_header, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK: Final = 256
MAX_FILE: Final = 16 << 30
_PICKLE = "adapter_model.bin"
_WIDE = {"F32", "F16", "BF16"}
_SAVED = re.compile(r"(?:modules_to_save\.(?:default\.)?|base_layer\.)?weight")
_PART = re.compile(r"(lora_A|lora_B)(?:\.default)?\.weight|lora_magnitude_vector(?:\.default)?(?:\.weight)?")
_OF_EMBEDDING = re.compile(r"lora_embedding_[AB](?:\.default)?")
_NOT_READ: Final[dict[str, str]] = {
    "fan_in_fan_out": "weights of Conv1D layers",
    "layer_replication": "layers that are repeated",
    "trainable_token_indices": "single trained tokens (trainable_token_indices)",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "biases beside B (lora_bias)",
}
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq")


class AdapterError(ModelError):
    """The folder is not an adapter that can be applied."""

    code = "bad_adapter"


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """Adapted linear: `a` is [rank, inputs], `b` [outputs, rank]."""

    name: str
    a: TensorEntry
    b: TensorEntry
    scale: float
    magnitude: TensorEntry | None = None
    """Length of each output's weights, of DoRA."""
    parameters: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Rank and scale of each tensor of a layer's experts that this may adapt; empty: it adapts a linear.
    `a` is [experts * rank, inputs], `b` [outputs, rank * experts].
    """

    @property
    def rank(self) -> int:
        """Rank of a linear, of one expert."""
        return max((rank for rank, _ in self.parameters.values()), default=self.a.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the base's weight."""
        return self.b.shape[0], self.a.shape[1]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Parsed adapter of a folder."""

    directory: Path
    base: str
    """Name of the base model, as whoever trained it wrote it; it may be empty."""
    rank: int
    targets: Mapping[str, AdapterTarget]
    """By the name of the linear in the base model, without `.weight`."""
    saved: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Modules saved whole, by name."""
    is_dora: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors in 16 bits."""
        entries = [entry for target in self.targets.values() for entry in (target.a, target.b)]
        return sum(2 * math.prod(entry.shape) for entry in (*entries, *self.saved.values()))

    def memory_bytes(self, width: int, *, is_int8: bool) -> int:
        """Return its bytes in memory, with numbers of `width` bytes; with `is_int8` those of A and B have
        one, and there are scales (`LoraOps.is_int8`). Modules saved whole keep their width.
        """
        whole = sum(math.prod(entry.shape) for entry in self.saved.values())
        return width * whole + bytes_in_memory(self.nbytes // 2 - whole, width, is_int8=is_int8)


def bytes_in_memory(numbers: int, width: int, *, is_int8: bool) -> int:
    """Return the bytes of so many numbers of A and B."""
    return numbers + numbers // 16 if is_int8 else width * numbers


def has_int8_numbers(device: str, quant: str) -> bool:
    """Return whether A and B have 8 bits in memory: on CPUs, beside quantized weights."""
    return device == "cpu" and quant != "none"


def read_adapter(directory: Path) -> Adapter:
    """Parse an adapter's folder. Raises AdapterError, which names the file or the tensor and a remedy."""
    try:
        return _read_adapter(directory)
    except OSError as error:  # a name that is too long, a folder of somebody else
        raise AdapterError(f"{directory} cannot be read: {error.strerror or error}") from None


def _read_adapter(directory: Path) -> Adapter:
    if not directory.is_dir():
        raise AdapterError(f"{directory} is not a folder: name the one with {CONFIG}")
    config = _read_config(directory)
    _refuse_what_is_not_read(config, directory)
    file = directory / WEIGHTS
    if not file.exists():
        if (directory / _PICKLE).exists():
            raise AdapterError(
                f"{directory} has its weights in {_PICKLE}, a pickle, which can run code when it is opened: "
                f"save the adapter with safe_serialization=True, which writes {WEIGHTS}"
            )
        raise AdapterError(f"{directory} has no {WEIGHTS}: fetch the adapter again")
    if file.stat().st_size > MAX_FILE:
        raise AdapterError(f"{file} is larger than {MAX_FILE >> 30} GB: an adapter is smaller than that")
    try:
        entries = read_header(file)
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(str(error)) from None
    return _Parser(directory, config).parse(entries)


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    if not file.exists():
        is_model = (directory / "config.json").exists()
        hint = ": it is a whole model, which `llmbox up` takes" if is_model else ""
        raise AdapterError(f"{directory} has no {CONFIG}{hint or ', which PEFT writes beside the weights'}")
    try:
        return read_json(file)
    except ModelError as error:
        raise AdapterError(str(error)) from None


def _refuse_what_is_not_read(config: Mapping[str, Any], directory: Path) -> None:
    where = f"{directory / CONFIG}"
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{where}: peft_type is {config.get('peft_type')!r}, only 'LORA' is supported")
    for key, name in _NOT_READ.items():
        if config.get(key):
            raise AdapterError(f"{where}: {key} is set, and adapters with {name} are not supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{where}: bias is {config['bias']!r}, and trained biases are not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{where}: init_lora_weights is {start[:40]!r}, which changes the base's weights too: save with "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )


class _Parser:
    """Parser of one folder's tensors."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self._directory = directory
        self._config = config
        self._where = f"{directory / CONFIG}"
        self._rank = self._whole("r", config.get("r", 8))
        self._alpha = self._number("lora_alpha", config.get("lora_alpha", 8))
        self._ranks = self._pattern("rank_pattern")
        self._alphas = self._pattern("alpha_pattern")

    def parse(self, entries: Mapping[str, TensorEntry]) -> Adapter:
        parts: dict[str, dict[str, TensorEntry]] = {}
        saved: dict[str, TensorEntry] = {}
        for entry in entries.values():
            if entry.dtype not in _WIDE:
                raise self._wrong(
                    entry, f"dtype {entry.dtype} is not supported, only {', '.join(sorted(_WIDE))}"
                )
            self._sort(entry, parts, saved)
        targets = {name: self._target(name, found) for name, found in parts.items()}
        if not targets and not saved:
            raise AdapterError(f"{self._directory / WEIGHTS}: it holds no lora_A and lora_B: {_ASK_PEFT}")
        base = self._config.get("base_model_name_or_path")
        is_dora = bool(self._config.get("use_dora"))
        for target in targets.values():
            if is_dora != (target.magnitude is not None):
                has = "has no lora_magnitude_vector" if is_dora else "has a lora_magnitude_vector"
                raise AdapterError(f"{self._where}: use_dora is {is_dora}, but {target.name} {has}")
        ranks = [target.rank for target in targets.values()]
        name = base if isinstance(base, str) else ""
        return Adapter(self._directory, name, max(ranks, default=0), targets, saved, is_dora)

    def _sort(
        self, entry: TensorEntry, parts: dict[str, dict[str, TensorEntry]], saved: dict[str, TensorEntry]
    ) -> None:
        name = entry.name
        for prefix in ("base_model.model.", "base_model."):
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        words = name.split(".")
        for number in range(1, len(words)):
            rest = ".".join(words[number:])
            module = plain_name(".".join(words[:number]))
            if _OF_EMBEDDING.fullmatch(rest):
                raise self._wrong(
                    entry, "LoRA of an embedding is not applied: train it whole, in modules_to_save"
                )
            if _PART.fullmatch(rest):
                part = "magnitude" if rest.startswith("lora_magnitude") else words[number]
                if parts.setdefault(module, {}).setdefault(part, entry) is not entry:
                    raise self._wrong(entry, "another tensor is for the same module")
                return
            if _SAVED.fullmatch(rest):
                if saved.setdefault(module, entry) is not entry:
                    raise self._wrong(entry, "another tensor is for the same module")
                return
        raise self._wrong(entry, f"it is not part of a LoRA adapter: {_ASK_PEFT}")

    def _target(self, name: str, found: Mapping[str, TensorEntry]) -> AdapterTarget:
        a, b = found.get("lora_A"), found.get("lora_B")
        if a is None or b is None:
            one = next(iter(found.values()))
            missing = "lora_A" if a is None else "lora_B"
            raise self._wrong(one, f"{name} has no {missing}: the file is cut short, download it again")
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise self._wrong(b, f"shape {list(b.shape)} does not go with {list(a.shape)} of lora_A")
        if self._config.get("target_parameters") and name.removesuffix(".base_layer").endswith(".experts"):
            return self._experts(name, a, b)
        rank = a.shape[0]
        told = self._ranks.get(_key_of(self._ranks, name), self._rank)
        if rank != told and self._config.get("target_parameters") and rank % told == 0:
            raise self._wrong(
                a,
                "of target_parameters, only `experts` (gate_up_proj, down_proj) and routers are supported",
            )
        if not 1 <= rank <= MAX_RANK:
            raise self._wrong(a, f"its rank is {rank}, allowed are 1 to {MAX_RANK}")
        if rank != told:
            raise self._wrong(a, f"its rank is {rank}, but {CONFIG} says {told:g}")
        alpha = self._alphas.get(_key_of(self._alphas, name), self._alpha)
        scale = alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)
        magnitude = found.get("magnitude")
        if magnitude is not None and math.prod(magnitude.shape) != b.shape[0]:
            raise self._wrong(magnitude, f"shape {list(magnitude.shape)} is not one number for each output")
        return AdapterTarget(name, a, b, scale, magnitude)

    def _experts(self, name: str, a: TensorEntry, b: TensorEntry) -> AdapterTarget:
        """Return a target of all experts of a layer, of whose tensors PEFT does not say which one it is."""
        parameters = {}
        for parameter in ("gate_up_proj", "down_proj"):
            full = f"{name.removesuffix('.base_layer')}.{parameter}"
            rank = int(self._ranks.get(_key_of(self._ranks, full), self._rank))
            alpha = self._alphas.get(_key_of(self._alphas, full), self._alpha)
            parameters[parameter] = (
                rank,
                alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank),
            )
        if not a.shape[0] or all(a.shape[0] % rank for rank, _ in parameters.values()):
            raise self._wrong(a, f"its {a.shape[0]} ranks of all experts are not those that {CONFIG} says")
        return AdapterTarget(name, a, b, 1.0, parameters=parameters)

    def _whole(self, key: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise AdapterError(f"{self._where}: {key} is {_show(value)}, allowed are 1 to {MAX_RANK}")
        return value

    def _number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e6:
            raise AdapterError(f"{self._where}: {key} is {_show(value)}, which is not a valid scale")
        return float(value)

    def _pattern(self, key: str) -> dict[str, float]:
        """Read names of modules, or ends of names, with a number each."""
        pattern = self._config.get(key) or {}
        if not isinstance(pattern, dict) or len(pattern) > 10_000:
            raise AdapterError(f"{self._where}: {key} is not a table of modules and numbers")
        read = self._whole if key == "rank_pattern" else self._number
        found: dict[str, float] = {}
        for name, value in pattern.items():
            literal = name.removeprefix("^").removeprefix(".*\\.").removesuffix("$").replace("\\.", ".")
            if re.search(r"[\\^$*+?{}\[\]|()]", literal):
                raise AdapterError(
                    f"{self._where}: {key} has the expression {_show(name)}; names of modules and "
                    "their suffixes are supported, regular expressions are not"
                )
            found[plain_name(literal)] = read(f"{key}[{_show(name)}]", value)
        return found

    def _wrong(self, entry: TensorEntry, why: str) -> AdapterError:
        return AdapterError(f"{entry.file}: tensor {shown(entry.name)}: {why}")


_NAMES = {"block_sparse_moe": "mlp"}
_ASK_PEFT = "only what PEFT's save_pretrained writes is read"


def plain_name(module: str) -> str:
    """Return a module's name without the place of the language model in a larger one, and with the name that
    transformers has for a mixture of experts, which checkpoints may call otherwise.
    """
    words = [_NAMES.get(word, word) for word in module.split(".") if word != "language_model"]
    if words and words[0] in {"layers", "embed_tokens"}:
        words.insert(0, "model")
    while words[:2] == ["model", "model"]:
        del words[0]
    return ".".join(words)


def _key_of(pattern: Mapping[str, float], name: str) -> str:
    """Return the first key that is the name or its end, as PEFT finds it; empty: none is."""
    return next((key for key in pattern if name == key or name.endswith(f".{key}")), "")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
