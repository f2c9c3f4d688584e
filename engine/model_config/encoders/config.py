"""Encoders of the BERT family as they are configured, and pooling of embedding models in the files of
sentence-transformers.

modules.json            list of modules: a transformer, a pooling, maybe dense layers and a normalization
1_Pooling/config.json   pooling mode
2_Dense/config.json     sizes and activation of a dense layer over the pooled vector; its weights stand beside
config_sentence_transformers.json   prompts: texts that are put before a query or a document
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ...checkpoint.files import read_json, read_value
from ...checkpoint.index import differ, list_tensors
from ...errors import ModelError
from ...sampling_params import Pooling
from ..fields import Fields

if TYPE_CHECKING:
    from ..config import ModelConfig

EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig:
    """Head of a reranker or classifier: dense layer, activation, maybe a norm, and a row for each label."""

    labels: int
    activation: EncoderActivation = "tanh"
    pooling: Literal["cls", "mean"] = "cls"
    dense_bias: bool = True
    has_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Properties of an encoder beside those of `ModelConfig`, whose `rms_norm_eps` is that of LayerNorms."""

    activation: EncoderActivation
    is_pre_norm: bool = False
    """True if norms stand before attention and MLP, except before the first attention."""
    norm_bias: bool = True
    position_rows: int = 0
    """Rows of the table of learned positions; 0: none."""
    position_offset: int = 0
    """Row of the first token."""
    type_rows: int = 0
    """Rows of the table of token types, which tell the two texts of a pair apart."""
    rotates: bool = False
    is_gated: bool = False
    up_bias: bool = True
    down_bias: bool = True
    relative_buckets: int = 0
    """Buckets of distances with a learned bias of attention scores, in all layers the same; 0: none."""
    has_alibi: bool = False
    """True if attention scores fall with the distance of two tokens, in each head at a rate of its own."""
    experts: tuple[int, int] = (0, 0)
    """Experts of a layer, and those that each token selects; 0: there are none."""
    experts_every: int = 2
    """Layers after which experts come again, from the second layer on; others have an MLP."""
    has_expert_bias: bool = True
    """True if a bias is added to the sum of experts, and the matrices behind their activation are stored with
    inputs as rows; False: as a GGUF file has them."""
    tasks: tuple[tuple[str, str], ...] = ()
    """Tasks with a LoRA adapter each, which a request may name, and the text that each puts before a text."""
    task_rank: int = 0
    task_scale: float = 1.0
    head: ClassifierConfig | None = None
    renames: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement) for names of tensors, applied in order."""

    def has_experts(self, layer: int) -> bool:
        return self.experts[0] > 0 and layer % self.experts_every == 1

    def task_linears(self, config: "ModelConfig") -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of a layer's linears that tasks adapt, by name."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        found = {"self_attn.qkv_proj": (hidden, 3 * hidden), "self_attn.o_proj": (hidden, hidden)}
        found |= {"mlp.up_proj": (hidden, ffn), "mlp.down_proj": (ffn, hidden)}
        return found if self.tasks else {}

    def rename(self, name: str) -> str:
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


UNUSED_OF_ENCODERS = (
    *("cls.", "lm_head.", "decoder.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
    *("pooler.", "embeddings.position_ids", "embeddings.token_type_ids", "adapters."),
)
"""Tensors of heads that predict words, poolers that no vector passes, buffers, and adapters of tasks."""

MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
DENSE_WEIGHTS = "model.safetensors"
DENSE_FILES = tuple(f"{i}_Dense/{name}" for i in (2, 3) for name in ("config.json", DENSE_WEIGHTS))
"""Files of dense layers, as sentence-transformers names them."""
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean",  # another norm, which is 1 after normalization
    "pooling_mode_cls_token": "cls",
}
_NAMES: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean",
    "cls": "cls",
}
"""Values of `pooling_mode` in newer folders."""
_STEPS = {"Transformer", "Pooling", "Normalize"}
_ENCODER_MODES: Final = {"pooling_mode_max_tokens": "max", "pooling_mode_weightedmean_tokens": "weighted"}
_ENCODER_NAMES: Final = {"max": "max", "weightedmean": "weighted"}
_WIDEST: Final = 1 << 16
EncoderPooling = Literal["last", "mean", "cls", "max", "weighted"]
"""Pooling of an encoder, which has all states of a text at once: `weighted` is a mean with the weights 1, 2,
3 and so on."""
_WITH_FOLDER: Final = {"Pooling", "Dense"}
DenseActivation = Literal["Identity", "Tanh", "ReLU", "GELU"]
_DENSE_ACTIVATIONS: Final[dict[str, DenseActivation]] = {
    "Identity": "Identity",
    "Tanh": "Tanh",
    "ReLU": "ReLU",
    "GELU": "GELU",
}


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """Dense layer over a pooled vector."""

    file: Path
    """Its weights; for tensors of a GGUF file, where they would be."""
    inputs: int
    outputs: int
    has_bias: bool
    activation: DenseActivation
    gguf_tensor: str = ""
    """Name in the GGUF file of the model's folder; empty: it is in `file`."""


@dataclass(frozen=True, slots=True)
class EncoderVectors:
    """Declaration of how an encoder makes vectors."""

    pooling: EncoderPooling
    dense: tuple[DenseLayer, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Pooling of a model, declared by its folder or by default."""

    pooling: Pooling
    is_declared: bool
    """True if the folder declares pooling: the model was made for embeddings."""
    problem: str = ""
    """Reason why the declared pooling is not supported; empty if it is."""


def is_declared(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (MODULES_FILE, POOLING_FILE))


def read_pooling(directory: Path, *, generates: bool) -> PoolingConfig:
    """Return the declared pooling of a model's folder. Default: mean for a model that generates text, else
    the last token.

    Never raises: a model with an unsupported declaration may still be loaded.
    """
    default: Pooling = "mean" if generates else "last"
    if not is_declared(directory):
        return PoolingConfig(default, is_declared=False)
    try:
        return PoolingConfig(_read_declared(directory), is_declared=True)
    except ModelError as error:
        return PoolingConfig(default, is_declared=True, problem=str(error).replace(f"{directory}/", ""))


def _read_declared(directory: Path) -> Pooling:
    """Read the declared pooling of a decoder. Raises ModelError."""
    (pooling, *_) = _folders(directory, _STEPS)
    mode: Pooling = _pooling(pooling / "config.json", _MODES, _NAMES)
    return mode


def read_vectors(directory: Path, hidden: int) -> EncoderVectors:
    """Return how an encoder makes vectors; without a declaration the mean of all tokens.

    `hidden`: width of its states. Raises ModelError for a declaration that cannot be followed.
    """
    if not is_declared(directory):
        return EncoderVectors("mean")
    pooling, *folders = _folders(directory, _STEPS | {"Dense"})
    modes, names = {**_MODES, **_ENCODER_MODES}, {**_NAMES, **_ENCODER_NAMES}
    mode = _pooling(pooling / "config.json", modes, names)
    dense = tuple(_dense(folder) for folder in folders)
    widths = [hidden, *(layer.outputs for layer in dense)]
    for layer, width in zip(dense, widths, strict=False):
        if layer.inputs != width:
            raise ModelError(
                f"{layer.file.parent}/config.json: in_features is {layer.inputs}, but the vector has {width} "
                "numbers there"
            )
    return EncoderVectors(mode, dense)


def _dense(folder: Path) -> DenseLayer:
    file = folder / "config.json"
    fields = Fields(read_json(file), str(file))
    name = fields.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if name not in _DENSE_ACTIVATIONS:
        raise fields.error(f"activation_function {name} is not supported: {', '.join(_DENSE_ACTIVATIONS)}")
    tensor = fields.text("gguf_tensor", "")
    if not tensor and not (folder / DENSE_WEIGHTS).is_file():
        raise ModelError(
            f"{folder}: {DENSE_WEIGHTS} is missing; fetch the model again (pickles are not opened)"
        )
    return DenseLayer(
        file=folder / DENSE_WEIGHTS,
        inputs=fields.integer("in_features", most=_WIDEST),
        outputs=fields.integer("out_features", most=_WIDEST),
        has_bias=fields.flag("bias", default=True),
        activation=_DENSE_ACTIVATIONS[name],
        gguf_tensor=tensor,
    )


def _folders(directory: Path, known: set[str]) -> list[Path]:
    """Return the folder of the pooling, and those of dense layers after it. Raises ModelError."""
    file = directory / MODULES_FILE
    if not file.is_file():
        return [directory / "1_Pooling"]
    steps = read_value(file)
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ModelError(f"{file} must hold a list of modules")
    kinds = [str(step.get("type")).rpartition(".")[2] for step in steps]
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ModelError(f"{file} asks for the module {unknown[0]}, which is not supported")
    if kinds.count("Pooling") != 1:
        raise ModelError(f"{file} must name one Pooling module")
    if kinds != sorted(kinds, key=["Transformer", "Pooling", "Dense", "Normalize"].index):
        raise ModelError(f"{file}: modules in the order {', '.join(kinds)} are not supported")
    names = [step.get("path") for step, kind in zip(steps, kinds, strict=True) if kind in _WITH_FOLDER]
    for name in names:
        if not isinstance(name, str) or not _FOLDER.fullmatch(name):
            raise ModelError(f"{file}: {name!r} is not a folder beside it")
    return [directory / name for name in names]


def read_prompts(directory: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name that are put before texts, and the name of the default one.

    Raises ModelError.
    """
    file = directory / PROMPTS_FILE
    if not file.is_file():
        return {}, None
    fields = Fields(read_json(file), str(file))
    prompts = fields.mapping("prompts") or {}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise fields.error("prompts must be strings by name")
    default = fields.text("default_prompt_name", "")
    if default and default not in prompts:
        raise fields.error(f"default_prompt_name {default!r} is none of its prompts")
    return prompts, default or None


def _pooling(file: Path, modes: dict[str, Any], names: dict[str, Any]) -> Any:
    raw = read_json(file)
    if raw.get("include_prompt") is False:
        raise ModelError(f"{file}: include_prompt false is not supported, prompts are pooled with the text")
    if "pooling_mode" in raw:
        return _one_of(names, [Fields(raw, str(file)).text("pooling_mode")], file)
    return _one_of(modes, _enabled_modes(raw), file)


def _enabled_modes(raw: dict[str, Any]) -> list[str]:
    return [name for name, value in raw.items() if name.startswith("pooling_mode_") and value is True]


def _one_of(known: dict[str, Any], asked: list[str], file: Path) -> Any:
    if len(asked) != 1 or asked[0] not in known:
        more = ", the maximum, and the weighted mean" if "weighted" in known.values() else ""
        raise ModelError(
            f"{file} asks for {' and '.join(asked) or 'no pooling'}; supported is one of the last token, the "
            f"mean of all, the first (cls){more}"
        )
    return known[asked[0]]


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_WHOLE = "ForCausalLM"
_OTHERS = ("ForSequenceClassification", "TextModel", "Model")
"""Suffixes of class names of the same transformer without an output head."""


def with_head(architecture: str) -> str:
    """Return the class name with the output head: `Qwen3ForCausalLM` for `Qwen3Model`."""
    end = next((end for end in _OTHERS if _lacks_head(architecture, end)), None)
    return architecture if end is None else architecture.removesuffix(end) + _WHOLE


def _lacks_head(architecture: str, ends: str | tuple[str, ...]) -> bool:
    return architecture.endswith(ends) and not architecture.endswith("LMHeadModel")


def has_head(fields: Fields, directory: Path) -> bool:
    """Return True if the model has an output head, by the class name, tied embeddings, or the weight files.

    A folder without pooling configuration is expected to have a head: without one it is damaged.
    """
    named = fields.raw.get("architectures") or []
    names = named if isinstance(named, list) else [named]
    if any(isinstance(name, str) and _lacks_head(name, _OTHERS) for name in names):
        return False
    if fields.flag("tie_word_embeddings", default=False) or not is_declared(directory):
        return True
    try:
        return HEAD in list_tensors(directory)
    except ModelError:  # loading says why
        return True


def has_tied_head(fields: Fields, directory: Path) -> bool:
    """Return True if embeddings are the output head too: by `tie_word_embeddings`, unless the weight files
    hold a head with other numbers, which transformers takes then.
    """
    if not fields.flag("tie_word_embeddings", default=False):
        return False
    try:
        entries = list_tensors(directory)
        return not (entries.keys() >= {HEAD, EMBEDDING} and differ(entries[HEAD], entries[EMBEDDING]))
    except ModelError:  # loading says why
        return True
