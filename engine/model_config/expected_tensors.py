"""Check of a checkpoint's tensors by names and shapes against config.json, without torch.

`fit` runs it, and a load that fails runs it again, so that both say the same sentence. It accepts what loads:
what it cannot tell from the headers is left to the load.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from llmbox.kernels.activation import UNGATED, XIELU

from ..checkpoint.formats.weight_format import GgufFormat
from ..checkpoint.index import NOT_NEEDED, refuse_undeclared, renamed
from ..checkpoint.safetensors import TensorEntry, misplaced_tensor, missing_tensor, wrong_shape
from .architecture import EncoderConfig
from .config import ModelConfig
from .moe import ExpertsConfig
from .recurrent.config import RecurrentConfig

_NORMS: Final = {
    "pre_norm": ("input_layernorm", "post_attention_layernorm"),
    "layer_norm": ("input_layernorm", "post_attention_layernorm"),
    "post_norm": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "sandwich": (
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        "input_layernorm",
        "pre_feedforward_layernorm",
    ),
    "parallel": ("input_layernorm",),
    "single": ("input_layernorm",),
}
_FLOATS: Final = ("F64", "F32", "F16", "BF16")
_RECURRENT: Final = {
    "gated_delta": "linear_attn",
    "kimi_delta": "self_attn",
    "mamba2": "mamba",
    "short_conv": "conv",
}
UNUSED_OF_ENCODERS: Final = (
    *("cls.", "lm_head.", "decoder.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
    *("pooler.", "embeddings.position_ids", "embeddings.token_type_ids", "adapters."),
)
"""Tensors of heads that predict words, poolers that no vector passes, buffers, and adapters of tasks."""


def check_weights(where: str, config: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
    """Raise ModelError for the first tensor that is quantized without a word in config.json, is missing, has
    another shape than it says, or has no place in its architecture. Models whose layers differ in size, and
    GGUF files, are left to the load.
    """
    if config.stored is None:
        for name, entry in entries.items():
            if name.endswith(".weight"):
                refuse_undeclared(entry)
    if not is_known(config):
        return
    if config.encoder is not None:
        found = ExpectedTensors(where, config, renamed(entries, config.encoder.rename))
        unused = _check_encoder(found, config, config.encoder)
    else:
        found = ExpectedTensors(where, config, entries)
        unused = _check_decoder(found, config)
    left = {
        name: entry
        for name, entry in found.left.items()
        if not name.startswith(unused) and not name.endswith(NOT_NEEDED)
    }
    if left:
        raise misplaced_tensor(left)


def is_known(config: ModelConfig) -> bool:
    """Return whether all layers have the usual parts, of one size."""
    if config.altup is not None or config.layer_sizes or config.per_layer_width or config.norms_values:
        return False
    if isinstance(config.stored, GgufFormat):
        return False
    return config.encoder is not None or config.block in _NORMS


class ExpectedTensors:
    """Tensors of a checkpoint, from which those that the model asks for are taken one by one."""

    def __init__(self, where: str, config: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
        self.left = dict(entries)
        self.where, self._names = where, config.names
        self._is_quantized = config.stored is not None
        self._below: dict[str, list[str]] = {}
        """Names of the tensors below each module."""
        for name in entries:
            for end, letter in enumerate(name):
                if letter == ".":
                    self._below.setdefault(name[:end], []).append(name)

    def at(self, prefix: str, name: str) -> str:
        """Return a name below a prefix as the checkpoint has it (`Weights`)."""
        if name in self._names:
            return prefix + self._names[name]
        return prefix + ".".join(self._names.get(part, part) for part in name.split("."))

    def take(self, name: str, *shape: int) -> None:
        """Take a tensor. Vectors may be stored as one row, single numbers without dimensions."""
        entry = self.left.pop(name, None)
        if entry is None:
            raise missing_tensor(self.where, name)
        if entry.shape not in (shape, (1, *shape)) and (entry.shape, shape) != ((), (1,)):
            raise wrong_shape(entry, shape)

    def take_all(self, module: str) -> None:
        """Take all that is below a module."""
        for name in self._below.get(module, ()):
            self.left.pop(name, None)

    def take_stack(self, name: str) -> bool:
        """Take the tensors whose names begin so; False if there are none."""
        stack = [each for each in self.left if each.startswith(name)]
        for each in stack:
            del self.left[each]
        return bool(stack)

    def has(self, module: str) -> bool:
        return module in self._below

    def linears(
        self,
        module: str,
        rows: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        stacks: Iterable[str] = (),
    ) -> None:
        """Take linears below a module, {name: rows}, or a tensor of all of them that has one of the names
        `stacks`. Linears of a quantized checkpoint are checked by their format.
        """
        names = {self.at(module, name): outputs for name, outputs in rows.items()}
        stack = next((each for each in (self.at(module, name) for name in stacks) if self.has(each)), None)
        if stack is not None:
            names = {stack: sum(names.values())}
        for name, outputs in names.items():
            entry = self.left.get(f"{name}.weight")
            is_packed = entry is None or entry.dtype not in _FLOATS
            if not (self._is_quantized and self.has(name) and is_packed):
                self.take(f"{name}.weight", outputs, inputs)
        for name, outputs in names.items():
            if bias:
                self.take(f"{name}.bias", outputs)
            if self._is_quantized:
                self.take_all(name)


def _check_decoder(found: ExpectedTensors, config: ModelConfig) -> tuple[str, ...]:
    """Take all tensors of a decoder; return prefixes of those that nothing needs."""
    hidden, recurrent = config.hidden_size, config.recurrent
    found.linears("", {"model.embed_tokens": config.vocab_size}, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        is_recurrent = recurrent is not None and recurrent.layers[layer]
        has_attention = recurrent is None or recurrent.attention[layer]
        if recurrent is not None and is_recurrent:
            _take_recurrent(found, found.at(prefix, f"{_RECURRENT[recurrent.kind]}."), config, recurrent)
        if has_attention:
            take = _take_attention if config.latent is None else _take_latent
            take(found, found.at(prefix, "self_attn."), config)
        if config.block != "single" or not (is_recurrent or has_attention):
            _take_mlp(found, prefix, config, layer)
        for norm in _NORMS[config.recurrent_block if is_recurrent else config.block]:
            _take_norm(found, prefix, norm, config)
    _take_norm(found, "", "model.norm", config)
    unused = ["mtp."]
    unused += (f"model.layers.{config.num_layers + layer}." for layer in range(config.extra_layers))
    if config.tie_word_embeddings:
        return (*unused, "lm_head.weight")
    found.linears("", {"lm_head": config.vocab_size}, hidden, bias=config.head_bias)
    return tuple(unused)


def _take_norm(found: ExpectedTensors, prefix: str, name: str, config: ModelConfig) -> None:
    found.take(found.at(prefix, f"{name}.weight"), config.hidden_size)
    if config.block == "layer_norm":
        found.take(found.at(prefix, f"{name}.bias"), config.hidden_size)


def _take_attention(found: ExpectedTensors, module: str, config: ModelConfig) -> None:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    rows = {"q_proj": q * (1 + config.has_attention_gate), "k_proj": kv, "v_proj": kv}
    stacks = ("qkv_proj",) if config.has_stacked_projections else ()
    found.linears(module, rows, hidden, bias=config.qkv_bias, stacks=stacks)
    if config.has_sinks:
        found.take(found.at(module, "sinks"), config.num_heads)
    if config.has_head_gate:
        found.linears(module, {"g_proj": config.num_heads}, hidden)
    norms = {"heads": (head_dim, head_dim), "width": (q, kv)}.get(config.qk_norm or "", ())
    for norm, width in zip(("q_norm", "k_norm"), norms, strict=False):
        found.take(found.at(module, f"{norm}.weight"), width)
    found.linears(module, {"o_proj": hidden}, q, bias=config.o_bias)


def _take_latent(found: ExpectedTensors, module: str, config: ModelConfig) -> None:
    latent, hidden, heads = config.latent, config.hidden_size, config.num_heads
    assert latent is not None
    bias, inputs = latent.has_bias, latent.q_rank or hidden
    found.linears(module, {"kv_a_proj_with_mqa": latent.width}, hidden, bias=bias)
    found.take(found.at(module, "kv_a_layernorm.weight"), latent.kv_rank)
    if latent.q_rank:
        found.linears(module, {"q_a_proj": inputs}, hidden, bias=bias)
        found.take(found.at(module, "q_a_layernorm.weight"), inputs)
    found.linears(module, {"q_b_proj" if latent.q_rank else "q_proj": heads * latent.query}, inputs)
    found.linears(module, {"kv_b_proj": heads * (latent.nope + latent.value)}, latent.kv_rank)
    found.linears(module, {"o_proj": hidden}, heads * latent.value, bias=bias)


def _take_recurrent(
    found: ExpectedTensors, module: str, config: ModelConfig, recurrent: RecurrentConfig
) -> None:
    hidden, heads, values = config.hidden_size, recurrent.heads, recurrent.values
    keys, channels, width = recurrent.key_heads * recurrent.key_dim, recurrent.channels, recurrent.conv_width
    convolution, outputs, norm = "conv1d", "out_proj", recurrent.value_dim
    match recurrent.kind:
        case "short_conv":
            parts = dict.fromkeys(("in_proj_b", "in_proj_c", "in_proj_x"), channels)
            convolution, values = "conv", channels
        case "mamba2":
            parts = {"in_proj_z": values, "in_proj_x": values, "in_proj_B": keys, "in_proj_C": keys}
            parts["in_proj_dt"], norm = heads, values if recurrent.norm is not None else 0
        case "kimi_delta":
            parts, outputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), values), "o_proj"
            inner = recurrent.key_dim
            found.linears(module, {"f_a_proj": inner, "g_a_proj": inner, "b_proj": heads}, hidden)
            found.linears(module, {"f_b_proj": values, "g_b_proj": values}, inner)
        case _ if recurrent.is_interleaved:
            parts = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
        case _:
            parts = {"in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
            qkv = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
            found.linears(module, qkv, hidden, stacks=("in_proj_qkv",))
    stacks = ("in_proj",) if recurrent.kind in {"short_conv", "mamba2"} else ()
    found.linears(module, parts, hidden, bias=recurrent.bias, stacks=stacks)
    if not found.has(found.at(module, convolution)):
        sizes = (keys, keys, values) if recurrent.kind == "gated_delta" else (values,) * 3
        for name, rows in zip(("q_conv1d", "k_conv1d", "v_conv1d"), sizes, strict=True):
            found.take(found.at(module, f"{name}.weight"), rows, 1, width)
    else:
        found.take(found.at(module, f"{convolution}.weight"), channels, 1, width)
    if recurrent.conv_bias:
        found.take(found.at(module, f"{convolution}.bias"), channels)
    if heads:
        is_kimi = recurrent.kind == "kimi_delta"
        found.take(found.at(module, "A_log"), *((1, 1, heads, 1) if is_kimi else (heads,)))
        found.take(found.at(module, "dt_bias"), values if is_kimi else heads)
        if recurrent.kind == "mamba2":
            found.take(found.at(module, "D"), heads)
        if norm:
            found.take(found.at(module, "o_norm.weight" if is_kimi else "norm.weight"), norm)
    found.linears(module, {outputs: hidden}, values, bias=recurrent.out_bias)


def _take_mlp(found: ExpectedTensors, prefix: str, config: ModelConfig, layer: int) -> None:
    if config.experts is not None and config.experts.layers[layer]:
        module = found.at(prefix, f"{config.experts.module}.") if config.experts.module else prefix
        _take_experts(found, module, config, config.experts)
        return
    module = found.at(prefix, "mlp.")
    _take_gated(found, module, config, config.intermediate_size)
    if config.activation == "xielu":
        for number in XIELU._fields:
            found.take(found.at(module, f"act_fn.{number}"), 1)


def _take_gated(found: ExpectedTensors, module: str, config: ModelConfig, inner: int) -> None:
    """Take an MLP of `inner` rows."""
    ups = ("up_proj",) if config.activation in UNGATED else ("gate_proj", "up_proj")
    stacks = ("gate_up_proj",) if config.has_stacked_mlp else ()
    hidden, bias = config.hidden_size, config.mlp_bias
    found.linears(module, dict.fromkeys(ups, inner), hidden, bias=bias, stacks=stacks)
    found.linears(module, {"down_proj": hidden}, inner, bias=bias)


def _take_experts(found: ExpectedTensors, module: str, config: ModelConfig, experts: ExpertsConfig) -> None:
    """Take router, experts and the shared expert. Tensors of all experts are taken whatever their shape."""
    hidden, count = config.hidden_size, experts.count
    for numbers in (experts.correction, experts.factors):
        if numbers:  # maybe below the router
            found.take(found.at(module, numbers), count)
    found.linears(module, {experts.router: count}, hidden, bias=experts.has_bias)
    if experts.latent:
        found.linears(module, {"fc1_latent_proj": experts.latent}, hidden)
        found.linears(module, {"fc2_latent_proj": hidden}, experts.latent)
    *ups, down = experts.projections
    stacked, inputs = experts.stacked, experts.latent or hidden
    if stacked is not None and found.take_stack(found.at(module, stacked.gate_up)):
        if not found.take_stack(found.at(module, stacked.down)):
            raise missing_tensor(found.where, found.at(module, stacked.down))
    else:
        for expert in range(count):
            own = found.at(module, f"experts.{expert}.")
            rows = dict.fromkeys(filter(None, ups), experts.inner)
            found.linears(own, rows, inputs, bias=experts.has_bias, stacks=("gate_up_proj",))
            found.linears(own, {down: inputs}, experts.inner, bias=experts.has_bias)
    if experts.shared_inner:
        _take_gated(found, found.at(module, f"{experts.shared}."), config, experts.shared_inner)
    if experts.has_shared_gate:
        found.linears(module, {f"{experts.shared}_gate": 1}, hidden)


def _check_encoder(found: ExpectedTensors, config: ModelConfig, encoder: EncoderConfig) -> tuple[str, ...]:
    """Take all tensors of an encoder; return prefixes of those that nothing needs."""
    hidden, ffn, norm_bias = config.hidden_size, config.intermediate_size, encoder.norm_bias
    tables = {"tokens": config.vocab_size, "positions": encoder.position_rows, "types": encoder.type_rows}
    for table, size in tables.items():
        if size:
            found.take(f"model.embed_{table}.weight", size, hidden)
    if encoder.relative_buckets:
        found.take("model.relative_bias.weight", encoder.relative_buckets, config.num_heads)
    norms = ["model.embed_norm", *(["model.norm"] if encoder.is_pre_norm else [])]
    for layer in range(config.num_layers):
        module = f"model.layers.{layer}."
        rows = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)
        found.linears(f"{module}self_attn.", rows, hidden, bias=config.qkv_bias, stacks=("qkv_proj",))
        found.linears(f"{module}self_attn.", {"o_proj": hidden}, hidden, bias=config.o_bias)
        if encoder.has_experts(layer):
            found.linears(f"{module}mlp.", {"router.layer": encoder.experts[0]}, hidden)
            found.take_all(f"{module}mlp.experts")
        else:
            ups = dict.fromkeys(("gate_proj", "up_proj") if encoder.is_gated else ("up_proj",), ffn)
            stacks = ("gate_up_proj", "up_gate_proj")
            found.linears(f"{module}mlp.", ups, hidden, bias=encoder.up_bias, stacks=stacks)
            found.linears(f"{module}mlp.", {"down_proj": hidden}, ffn, bias=encoder.down_bias)
        own = _NORMS["pre_norm" if encoder.is_pre_norm else "post_norm"]
        norms += [f"{module}{norm}" for norm in own[encoder.is_pre_norm and not layer :]]
    for norm in norms:
        found.take(f"{norm}.weight", hidden)
        if norm_bias:
            found.take(f"{norm}.bias", hidden)
    if (head := encoder.head) is None:
        return (*UNUSED_OF_ENCODERS, "head.")
    found.linears("head.", {"dense": hidden}, hidden, bias=head.dense_bias)
    if head.has_norm:
        found.take("head.norm.weight", hidden)
        if norm_bias:
            found.take("head.norm.bias", hidden)
    found.linears("head.", {"out_proj": head.labels}, hidden, bias=True)
    return UNUSED_OF_ENCODERS
