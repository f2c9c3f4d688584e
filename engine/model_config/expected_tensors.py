"""Tensors of a model by names and shapes: their number, and the check of a checkpoint against config.json.

`fit` runs the check, and a load that fails runs it again, so that both say the same sentence. It accepts what
loads: what it cannot tell from the headers is left to the load.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from llmbox.kernels.activation import UNGATED, XIELU

from ..checkpoint.formats.weight_format import GgufFormat
from ..checkpoint.index import NOT_NEEDED, CountedTensors, ExpectedTensors, refuse_undeclared
from ..checkpoint.names import renamed
from ..checkpoint.safetensors import TensorEntry, misplaced_tensor, missing_tensor
from .architecture import BIASED_NORMS, NORMS, OWN_GATES
from .attention import LatentConfig
from .encoders.config import UNUSED_OF_ENCODERS, EncoderConfig
from .moe import ExpertsConfig, StackedExperts
from .recurrent.config import SharedBlocksConfig, take_recurrent

if TYPE_CHECKING:
    from .config import ModelConfig


def check_weights(where: str, config: "ModelConfig", entries: Mapping[str, TensorEntry]) -> None:
    """Raise ModelError for the first tensor that is quantized without a word in config.json, is missing, has
    another shape than it says, or has no place in its architecture. GGUF files are left to the load.
    """
    if config.stored is None:
        for name, entry in entries.items():
            if name.endswith(".weight"):
                refuse_undeclared(entry)
    if isinstance(config.stored, GgufFormat):
        return
    if config.encoder is not None:
        entries = renamed(entries, config.encoder.rename)
    found = ExpectedTensors(where, entries, config.names, is_quantized=config.stored is not None)
    encoder = config.encoder
    unused = _check_decoder(found, config) if encoder is None else _check_encoder(found, config, encoder)
    left = {
        name: entry
        for name, entry in found.left.items()
        if not name.startswith(unused) and not name.endswith(NOT_NEEDED)
    }
    if left:
        raise misplaced_tensor(left)


def count_parameters(config: "ModelConfig") -> int:
    """Return the number of parameters to load; tied weights count once."""
    found = CountedTensors()
    if config.encoder is None:
        _check_decoder(found, config)
    else:
        _check_encoder(found, config, config.encoder)
    return found.numbers


def count_layer_params(config: "ModelConfig") -> int:
    """Return the number of parameters of all layers without the norms around attention and MLP."""
    found = CountedTensors()
    for layer in range(config.num_layers):
        _take_layer(found, config, layer)
    return found.numbers


def _check_decoder(found: ExpectedTensors, config: "ModelConfig") -> tuple[str, ...]:
    """Take all tensors of a decoder; return prefixes of those that nothing needs."""
    hidden, recurrent, positions = config.hidden_size, config.recurrent, config.position_rows
    tables = {"tokens": config.vocab_size, **({"positions": positions} if positions else {})}
    found.linears("", {f"model.embed_{name}": rows for name, rows in tables.items()}, hidden)
    if width := config.per_layer_width:
        row = config.per_layer_row
        found.linears("", {"model.embed_tokens_per_layer": config.per_layer_vocab}, row)
        found.linears("", {"model.per_layer_model_projection": row}, hidden)
        found.take("model.per_layer_projection_norm.weight", width)
    if config.altup is not None:
        for stream in range(config.altup.streams - 1):
            names = f"model.altup_projections.{stream}", f"model.altup_unembed_projections.{stream}"
            found.linears("", dict.fromkeys(names, hidden), hidden)
    for layer in range(config.num_layers):
        _take_layer(found, config, layer)
        is_recurrent = recurrent is not None and recurrent.layers[layer]
        sizes = config.sizes_of(layer)
        for norm in NORMS[config.recurrent_block if is_recurrent else config.block]:
            is_there = sizes.has_attention if norm == "input_layernorm" else sizes.has_mlp
            if is_there:
                _take_norm(found, f"model.layers.{layer}.", norm, config)
    _take_norm(found, "", "model.norm", config)
    unused = ["mtp.", "model.mtp_layers.", "model.mtp."]
    unused += (f"model.layers.{config.num_layers + layer}." for layer in range(config.extra_layers))
    if config.tie_word_embeddings:
        return (*unused, "lm_head.weight")
    found.linears("", {"lm_head": config.vocab_size}, hidden, bias=config.head_bias)
    return tuple(unused)


def _take_layer(found: ExpectedTensors, config: "ModelConfig", layer: int) -> None:
    """Take a layer without the norms around attention and MLP."""
    prefix, recurrent = f"model.layers.{layer}.", config.recurrent
    is_recurrent = recurrent is not None and recurrent.layers[layer]
    sizes = config.sizes_of(layer)
    has_attention = sizes.has_attention if recurrent is None else recurrent.attention[layer]
    if recurrent is not None and is_recurrent:
        take_recurrent(found, prefix, config.hidden_size, recurrent)
    if config.shared is not None and layer in config.shared.layers:
        _take_shared(found, prefix, config, config.shared, layer)
    elif has_attention:
        module = found.at(prefix, "self_attn.")
        if config.latent is None:
            _take_attention(found, module, config, layer)
        else:
            _take_latent(found, module, config, config.latent, layer)
    if config.block in {"scaled_sandwich", "altup"}:
        _take_gemma(found, prefix, config)
    is_single = config.block in {"single", "shared"}
    if sizes.has_mlp and not (is_single and (is_recurrent or has_attention)):
        _take_mlp(found, prefix, config, layer)


def _take_shared(
    found: ExpectedTensors, prefix: str, config: "ModelConfig", shared: SharedBlocksConfig, layer: int
) -> None:
    """Take what a layer of Zamba2 has beside Mamba: the linear behind its block, and the block itself, if
    it is here, with the adapters of all layers that share it.
    """
    hidden, inner, rank = config.hidden_size, config.intermediate_size, shared.rank
    found.linears(prefix, {"linear": hidden}, hidden)
    if not (uses := shared.uses(layer)):
        return
    module = f"{prefix}shared_transformer."
    found.take(f"{module}input_layernorm.weight", 2 * hidden)
    found.take(f"{module}pre_ff_layernorm.weight", hidden)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found.linears(f"{module}self_attn.", {"q_proj": q, "k_proj": kv, "v_proj": kv}, 2 * hidden)
    found.linears(f"{module}self_attn.", {"o_proj": hidden}, q)
    adapted = {"feed_forward.gate_up_proj_adapter_list": (hidden, 2 * inner)}
    for part in "qkv" if shared.adapts_attention else "":
        adapted[f"self_attn.linear_{part}_adapter_list"] = (2 * hidden, q)
    for name, (inputs, outputs) in adapted.items():
        for use in uses:
            found.linears(f"{module}{name}.{use}.", {"0": rank}, inputs)
            found.linears(f"{module}{name}.{use}.", {"1": outputs}, rank)
    found.linears(f"{module}feed_forward.", {"gate_up_proj": 2 * inner}, hidden, bias=config.mlp_bias)
    found.linears(f"{module}feed_forward.", {"down_proj": hidden}, inner, bias=config.mlp_bias)


def _take_norm(found: ExpectedTensors, prefix: str, name: str, config: "ModelConfig") -> None:
    if not config.has_norm_weights:
        return
    found.take(found.at(prefix, f"{name}.weight"), config.hidden_size)
    if config.block in BIASED_NORMS:
        found.take(found.at(prefix, f"{name}.bias"), config.hidden_size)


def _take_gemma(found: ExpectedTensors, prefix: str, config: "ModelConfig") -> None:
    """Take what a layer of Gemma 3n or 4 has beside attention, MLP and their norms."""
    hidden, width = config.hidden_size, config.per_layer_width
    if width:
        found.linears(prefix, {"per_layer_input_gate": width}, hidden)
        found.linears(prefix, {"per_layer_projection": hidden}, width)
        found.take(f"{prefix}post_per_layer_input_norm.weight", hidden)
    if config.altup is None:
        found.take(f"{prefix}layer_scalar", 1)
    else:
        streams, rank = config.altup.streams, config.altup.laurel_rank
        found.take(f"{prefix}altup.router_norm.weight", hidden)
        found.linears(f"{prefix}altup.", {"modality_router": streams}, hidden)
        found.take(f"{prefix}altup.prediction_coefs.weight", streams**2, streams)
        found.take(f"{prefix}altup.correction_coefs.weight", streams, streams)
        found.take(f"{prefix}altup.correct_output_scale", hidden)
        found.linears(f"{prefix}laurel.", {"linear_left": rank}, hidden)
        found.linears(f"{prefix}laurel.", {"linear_right": hidden}, rank)
        found.take(f"{prefix}laurel.post_laurel_norm.weight", hidden)
    if config.experts is not None:  # beside the MLP, which is no shared expert of theirs
        _take_experts(found, prefix, config, replace(config.experts, shared_inner=0))
        found.take(f"{prefix}router.scale", hidden)
        for norm in ("post_{}_1", "pre_{}_2", "post_{}_2"):
            found.take(f"{prefix}{norm.format('feedforward_layernorm')}.weight", hidden)


def _take_attention(found: ExpectedTensors, module: str, config: "ModelConfig", layer: int) -> None:
    sizes, hidden = config.sizes_of(layer), config.hidden_size
    head_dim, has_kv = sizes.head_dim, sizes.kv_source == layer
    all_heads, value_dim = sizes.heads, sizes.value_dim
    q, kv, v = all_heads * head_dim, sizes.kv_heads * head_dim, sizes.kv_heads * value_dim
    rows = {"q_proj": q * (1 + (config.attention_gate == "q_proj"))}
    if config.attention_gate in OWN_GATES:
        rows[config.attention_gate] = q
    if has_kv:
        rows |= {"k_proj": kv, "v_proj": v} if sizes.has_values else {"k_proj": kv}
    else:  # some checkpoints have them, unused
        for name in ("k_proj", "v_proj", "k_norm"):
            found.take_all(found.at(module, name))
    if config.stacks_by_group:
        rows = {"qkv_proj": q + 2 * kv}
    stacks = ("qkv_proj",) if config.has_stacked_projections else ()
    found.linears(module, rows, hidden, bias=config.qkv_bias, stacks=stacks)
    if config.has_sinks and sizes.has_sinks:
        found.take(found.at(module, "sinks"), all_heads)
    if config.has_head_gate:
        found.linears(module, {"g_proj": all_heads}, hidden)
    if config.has_sub_norms:
        found.take(found.at(module, "attn_sub_norm.weight"), q)
    for norm, heads in (("q_norm", all_heads), *((("k_norm", sizes.kv_heads),) if has_kv else ())):
        match config.qk_norm:
            case "heads":
                found.take(found.at(module, f"{norm}.weight"), head_dim)
            case "width":
                found.take(found.at(module, f"{norm}.weight"), heads * head_dim)
            case "layer":
                found.take(found.at(module, f"{norm}.weight"), heads, head_dim)
            case "layer_by_head":
                for head in range(heads):
                    found.take(found.at(found.at(module, f"{norm}."), f"{head}.weight"), head_dim)
    found.linears(module, {"o_proj": hidden}, all_heads * value_dim, bias=config.o_bias)


def _take_latent(
    found: ExpectedTensors, module: str, config: "ModelConfig", latent: LatentConfig, layer: int
) -> None:
    hidden, heads = config.hidden_size, config.num_heads
    bias, inputs = latent.has_bias, latent.q_rank or hidden
    found.linears(module, {"kv_a_proj_with_mqa": latent.compressed}, hidden, bias=bias)
    found.take(found.at(module, "kv_a_layernorm.weight"), latent.kv_rank)
    if latent.q_rank:
        found.linears(module, {"q_a_proj": inputs}, hidden, bias=bias)
        found.take(found.at(module, "q_a_layernorm.weight"), inputs)
    found.linears(module, {"q_b_proj" if latent.q_rank else "q_proj": heads * latent.query}, inputs)
    found.linears(module, {"kv_b_proj": heads * (latent.nope + latent.value)}, latent.kv_rank)
    if config.has_head_gate:
        found.linears(module, {"g_proj": heads}, hidden)
    found.linears(module, {"o_proj": hidden}, heads * latent.value, bias=bias)
    if (index := latent.index) is not None and index.layers[layer]:
        module = found.at(module, "indexer.")
        found.linears(module, {"wq_b": index.heads * index.dim}, inputs)
        found.linears(module, {"wk": index.dim, "weights_proj": index.heads}, hidden)
        for part in ("weight", "bias"):
            found.take(found.at(module, f"k_norm.{part}"), index.dim)


def _take_mlp(found: ExpectedTensors, prefix: str, config: "ModelConfig", layer: int) -> None:
    is_beside = config.block == "scaled_sandwich"
    if config.experts is not None and config.experts.layers[layer] and not is_beside:
        module = found.at(prefix, f"{config.experts.module}.") if config.experts.module else prefix
        _take_experts(found, module, config, config.experts)
        if config.norms_experts:
            _take_norm(found, prefix, "post_mlp_layernorm", config)
        return
    if config.norms_experts:  # some checkpoints have it, unused
        found.take_all(found.at(prefix, "post_mlp_layernorm"))
    module = found.at(prefix, "mlp.")
    _take_gated(found, module, config, config.sizes_of(layer).inner)
    if config.has_sub_norms:
        found.take(found.at(module, "ffn_sub_norm.weight"), config.sizes_of(layer).inner)
    if config.activation == "xielu":
        for number in XIELU._fields:
            found.take(found.at(module, f"act_fn.{number}"), 1)


def _take_gated(found: ExpectedTensors, module: str, config: "ModelConfig", inner: int) -> None:
    """Take an MLP of `inner` rows."""
    ups = ("up_proj",) if config.activation in UNGATED else ("gate_proj", "up_proj")
    stacks = ("gate_up_proj",) if config.has_stacked_mlp else ()
    hidden, bias = config.hidden_size, config.mlp_bias
    found.linears(module, dict.fromkeys(ups, inner), hidden, bias=bias, stacks=stacks)
    found.linears(module, {"down_proj": hidden}, inner, bias=bias)


def _take_experts(found: ExpectedTensors, module: str, config: "ModelConfig", experts: ExpertsConfig) -> None:
    """Take router, experts and the shared expert."""
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
    if stacked is None or not _take_stacks(found, module, experts, stacked, inputs):
        for expert in found.each(count):
            own = found.at(module, f"experts.{expert}.")
            rows = dict.fromkeys(filter(None, ups), experts.inner)
            found.linears(own, rows, inputs, bias=experts.has_bias, stacks=("gate_up_proj",))
            found.linears(own, {down: inputs}, experts.inner, bias=experts.has_bias)
    if experts.shared_inner:
        _take_gated(found, found.at(module, f"{experts.shared}."), config, experts.shared_inner)
    if experts.has_shared_gate:
        found.linears(module, {f"{experts.shared}_gate": 1}, hidden)


def _take_stacks(
    found: ExpectedTensors, module: str, experts: ExpertsConfig, stacked: StackedExperts, width: int
) -> bool:
    """Take the tensors that hold all experts of a layer, of rows of this width; False if there are none."""
    count, inner, bias = experts.count, experts.inner, experts.has_bias
    ups = [(stacked.gate, inner), (stacked.up, inner)] if stacked.gate else [(stacked.gate_up, 2 * inner)]
    for name, outputs, inputs in (*((name, rows, width) for name, rows in ups), (stacked.down, width, inner)):
        shape = (count, inputs, outputs) if stacked.is_transposed else (count, outputs, inputs)
        if not found.take_stack(found.at(module, name), shape, outputs * bias):
            if name == ups[0][0]:
                return False
            raise missing_tensor(found.where, found.at(module, name))
    return True


def _take_tasks(
    found: ExpectedTensors, name: str, tasks: int, a_shape: tuple[int, int], b_shape: tuple[int, int]
) -> None:
    """Take the adapters of one linear or table: A and B of each task."""
    found.take(f"{name}.lora_A", tasks, *a_shape)
    found.take(f"{name}.lora_B", tasks, *b_shape)


def _check_encoder(found: ExpectedTensors, config: "ModelConfig", encoder: EncoderConfig) -> tuple[str, ...]:
    """Take all tensors of an encoder; return prefixes of those that nothing needs."""
    hidden, ffn, norm_bias = config.hidden_size, config.intermediate_size, encoder.norm_bias
    tasks, rank = len(encoder.tasks), encoder.task_rank
    tables = {"tokens": config.vocab_size, "positions": encoder.position_rows, "types": encoder.type_rows}
    for table, size in tables.items():
        if size:
            found.take(f"model.embed_{table}.weight", size, hidden)
        if size and tasks and table != "positions":
            _take_tasks(found, f"model.embed_{table}", tasks, (size, rank), (rank, hidden))
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
            for stack in ("w1", "w2"):
                found.take(f"{module}mlp.experts.{stack}.weight", encoder.experts[0] * ffn, hidden)
            if encoder.has_expert_bias:
                found.take(f"{module}mlp.experts.bias", hidden)
        else:
            ups = dict.fromkeys(("gate_proj", "up_proj") if encoder.is_gated else ("up_proj",), ffn)
            stacks = ("gate_up_proj", "up_gate_proj")
            found.linears(f"{module}mlp.", ups, hidden, bias=encoder.up_bias, stacks=stacks)
            found.linears(f"{module}mlp.", {"down_proj": hidden}, ffn, bias=encoder.down_bias)
        for linear, (inputs, outputs) in encoder.task_linears(config).items():
            _take_tasks(found, f"{module}{linear}", tasks, (rank, inputs), (outputs, rank))
        own = NORMS["pre_norm" if encoder.is_pre_norm else "post_norm"]
        norms += [f"{module}{norm}" for norm in own[encoder.is_pre_norm and not layer :]]
    if (head := encoder.head) is not None and head.has_norm:
        norms.append("head.norm")
    for norm in norms:
        found.take(f"{norm}.weight", hidden)
        if norm_bias:
            found.take(f"{norm}.bias", hidden)
    if head is None:
        return (*UNUSED_OF_ENCODERS, "head.")
    found.linears("head.", {"dense": hidden}, hidden, bias=head.dense_bias)
    found.linears("head.", {"out_proj": head.labels}, hidden, bias=True)
    return UNUSED_OF_ENCODERS
