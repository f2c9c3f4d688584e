"""Mixture-of-experts part of config.json."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmbox.kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT

from .fields import Fields
from .shape import ExpertShape

MAX_EXPERTS = 1024
OTHER_ROUTERS = (
    "n_routed_experts",
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "n_group",
    "num_expert_group",
    "topk_group",
    "scoring_func",
    "topk_method",
    "routed_scaling_factor",
    "moe_router_use_sigmoid",
)
"""Keys of routers that these architectures do not have: they select or combine experts in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """Layout of checkpoints that hold the experts of a layer in one tensor."""

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    is_transposed: bool = False
    """True if tensors are [experts, inputs, outputs]."""
    is_interleaved: bool = False
    """True if gate and up alternate, row by row; else the gates come first."""
    turns_adapters: bool = False
    """True if PEFT takes inputs for outputs, as transformers does not say that tensors are transposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: the best `per_token` by their router are summed with their weights (`Routing` in
    `kernels/op_types.py`).
    """

    count: int
    """Number of experts of a layer."""
    per_token: int
    """Number of experts that each token selects."""
    inner: int
    """Intermediate size of an expert: rows of its gate and up projections."""
    normalized: bool
    """True if the routing weights of the selected experts are normalized to sum to one."""
    layers: tuple[bool, ...]
    """True for each layer with experts; the others have an MLP."""
    scoring: Literal["softmax", "sigmoid", "sigmoid_of_logits"] = "softmax"
    scale: float = 1.0
    """Multiplier of routing weights."""
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    """Groups of experts, of which `top_groups` are selected by the sum of their `group_best` best experts."""
    shared_inner: int = 0
    """Intermediate size of the expert that all tokens pass through; 0: there is none."""
    averages: bool = False
    """True if the result is the mean of that of experts and that of the shared one."""
    has_shared_gate: bool = False
    """True if the shared expert's result is multiplied by a gate of its own."""
    has_bias: bool = False
    """True if router and experts have biases."""
    module: str = "mlp"
    """Name of the MoE module inside a layer of the checkpoint; empty: the layer itself."""
    router: str = "gate"
    """Name of the router inside it, and of the shared expert below."""
    shared: str = "shared_experts"
    factors: str = ""
    """Name of the numbers by which weights of experts are multiplied at last; empty: there are none."""
    jitter: float = 0.0
    """See `Routing`."""
    scales_inputs: bool = False
    correction: str = ""
    """Name of the numbers that are added to scores where experts are selected; empty: there are none."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections in the checkpoint, without `.weight`. Without a gate
    the first is empty."""
    latent: int = 0
    """Width of the rows that experts read and write, between two linears; 0: the hidden size."""
    stacked: StackedExperts | None = None
    """Layout of tensors of all experts; None: each expert has tensors of its own."""

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    def shape(self) -> ExpertShape:
        return ExpertShape(
            count=self.count,
            per_token=self.per_token,
            inner=self.inner,
            layers=self.num_layers,
            shared=self.shared_inner,
            latent=self.latent,
        )


ExpertRule = Callable[[Fields, int], ExpertsConfig | None]
"""Rule (config.json, number of layers) -> experts; None for a model without. Raises ModelError."""


def experts_with(rule: ExpertRule, **changes: Any) -> ExpertRule:
    """Return `rule` for checkpoints with other names or another layout of experts."""

    def read(fields: Fields, layers: int) -> ExpertsConfig | None:
        found = rule(fields, layers)
        return found and replace(found, **changes)

    return read


def no_experts(_fields: Fields, _layers: int) -> None:
    return None


def in_all_layers(fields: Fields, layers: int, selected: tuple[int, int], **more: Any) -> ExpertsConfig:
    """Read experts in place of all MLPs, with weights that add up to one. `selected`: experts, and those of a
    token.
    """
    count, per_token = selected
    inner = fields.integer("intermediate_size")
    return ExpertsConfig(
        count=count, per_token=per_token, inner=inner, normalized=True, layers=(True,) * layers, **more
    )


def in_sparse_layers(
    fields: Fields, layers: int, selected: tuple[int, int], **more: Any
) -> ExpertsConfig | None:
    """Read experts of Qwen's kind, in the layers of `sparse_layers`; None if that is no layer."""
    count, per_token = selected
    found = ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=fields.integer("moe_intermediate_size"),
        normalized=fields.flag("norm_topk_prob", default=False),
        layers=sparse_layers(fields, layers),
        **more,
    )
    return found if any(found.layers) else None


def mixtral_experts(fields: Fields, layers: int) -> ExpertsConfig:
    w123 = ("w1", "w3", "w2")
    return in_all_layers(fields, layers, count_experts(fields), module="block_sparse_moe", projections=w123)


def qwen3_moe_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    return in_sparse_layers(fields, layers, count_experts(fields))


def qwen2_moe_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    selected = selected_of(fields, "num_experts")
    inner = fields.integer("shared_expert_intermediate_size")
    shared: dict[str, Any] = {"shared_inner": inner, "has_shared_gate": True, "shared": "shared_expert"}
    return in_sparse_layers(fields, layers, selected, **shared)


def lfm2_moe_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    count, per_token = selected_of(fields, "num_experts")
    dense = fields.number("num_dense_layers", 2)
    found = ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=fields.integer("moe_intermediate_size"),
        normalized=fields.flag("norm_topk_prob", default=True),
        layers=tuple(layer >= dense for layer in range(layers)),
        scoring="sigmoid",
        scale=fields.number("routed_scaling_factor", 1.0),
        correction="expert_bias" if fields.flag("use_expert_bias", default=True) else "",
    )
    return found if any(found.layers) else None


def olmoe_experts(fields: Fields, layers: int) -> ExpertsConfig:
    count, per_token = count_experts(fields)
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=fields.integer("intermediate_size"),
        normalized=fields.flag("norm_topk_prob", default=False),
        layers=(True,) * layers,
    )


def gpt_oss_experts(fields: Fields, layers: int) -> ExpertsConfig:
    for key, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(key, known) != known:
            raise fields.error(f"{key} {fields.raw[key]} is not supported, only {known}")
    return in_all_layers(
        fields,
        layers,
        count_experts(fields),
        has_bias=True,
        router="router",
        stacked=StackedExperts(is_transposed=True, is_interleaved=True),
    )


def granite_moe_experts(fields: Fields, layers: int) -> ExpertsConfig:
    return in_all_layers(
        fields,
        layers,
        selected_of(fields, "num_local_experts"),
        module="block_sparse_moe",
        router="router.layer",
        stacked=StackedExperts(gate_up="input_linear", down="output_linear"),
    )


def granite_hybrid_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read experts beside an MLP of each layer, if there are any (`recurrent/families.py::granite_sizes`)."""
    if fields.raw.get("num_local_experts") == 0:
        return None
    count, per_token = selected_of(fields, "num_local_experts")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=fields.integer("expert_intermediate_size"),
        normalized=True,
        layers=(True,) * layers,
        shared_inner=fields.integer("intermediate_size"),
        module="",
        router="block_sparse_moe.router.layer",
        shared="mlp",
        stacked=StackedExperts(
            gate_up="block_sparse_moe.input_linear", down="block_sparse_moe.output_linear"
        ),
    )


def minimax_m2_experts(fields: Fields, layers: int) -> ExpertsConfig:
    is_corrected = fields.flag("use_routing_bias", default=True)
    if not is_corrected or fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise fields.error("only a scoring_func of 'sigmoid' with use_routing_bias is supported")
    return in_all_layers(
        fields,
        layers,
        selected_of(fields, "num_local_experts"),
        scoring="sigmoid",
        module="block_sparse_moe",
        correction="e_score_correction_bias",
        projections=("w1", "w3", "w2"),
    )


def ernie_experts(fields: Fields, layers: int) -> ExpertsConfig:
    count, per_token = selected_of(fields, "moe_num_experts", "moe_k")
    first, end = fields.number("moe_layer_start_index", 1), fields.number("moe_layer_end_index", -1)
    last, interval = layers - 1 if end == -1 else end, fields.integer("moe_layer_interval", 1)
    inner = fields.integer("moe_intermediate_size")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=inner,
        normalized=True,
        layers=tuple(first <= layer <= last and (layer + 1) % interval == 0 for layer in range(layers)),
        shared_inner=inner * fields.integer("moe_num_shared_experts", 0),
        correction="moe_statics.e_score_correction_bias",
    )


def deepseek_v3_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read a router of sigmoids with a correction and groups: DeepSeek V3, GLM-4-MoE."""
    if fields.text("scoring_func", "sigmoid") != "sigmoid":
        raise fields.error(f"scoring_func {fields.raw['scoring_func']!r} is not supported, only 'sigmoid'")
    found = deepseek_experts(
        fields, layers, scoring="sigmoid", group_best=2, correction="gate.e_score_correction_bias"
    )
    return refuse_small_groups(fields, found) if any(found.layers) else None


def refuse_small_groups(fields: Fields, found: ExpertsConfig) -> ExpertsConfig:
    if found.groups > 1 and found.count // found.groups < found.group_best:
        raise fields.error(f"n_group {found.groups} leaves groups of one expert, which is not supported")
    return found


def deepseek_v1_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read a softmax router."""
    if fields.text("scoring_func", "softmax") != "softmax":
        raise fields.error(f"scoring_func {fields.raw['scoring_func']!r} is not supported, only 'softmax'")
    found = deepseek_experts(fields, layers)
    return found if any(found.layers) else None


def deepseek_v2_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read a softmax router, with groups under a `topk_method` of `group_limited_greedy`."""
    method = fields.text("topk_method", "greedy")
    if method not in {"greedy", "group_limited_greedy"}:
        raise fields.error(f"topk_method {method!r} is not supported")
    if method == "greedy":
        fields = fields.replace(n_group=1, topk_group=1)
    # transformers never normalizes them, whatever norm_topk_prob says.
    return deepseek_v1_experts(fields.replace(norm_topk_prob=False), layers)


def deepseek_experts(fields: Fields, layers: int, **router: Any) -> ExpertsConfig:
    count, per_token = selected_of(fields, "n_routed_experts")
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    if count % groups or top_groups > groups or per_token > count // groups * top_groups:
        raise fields.error(
            f"{top_groups} of {groups} groups (topk_group, n_group) do not hold {per_token} of {count} "
            "experts"
        )
    inner = fields.integer("moe_intermediate_size")
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=inner,
        normalized=fields.flag("norm_topk_prob", default=True),
        layers=layers_after_dense(fields, layers),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
        shared_inner=inner * fields.integer("n_shared_experts", 0),
        **router,
    )


def layers_after_dense(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts, by `mlp_layer_types` or after `first_k_dense_replace` ones."""
    types = fields.raw.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not set(types) <= {"dense", "sparse"}:
            raise fields.error(f"mlp_layer_types must name dense or sparse for each of {layers} layers")
        return tuple(name == "sparse" for name in types)
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error(f"moe_layer_freq {fields.raw['moe_layer_freq']} is not supported, only 1")
    dense = fields.number("first_k_dense_replace", 1)
    return tuple(layer >= dense for layer in range(layers))


def count_experts(fields: Fields) -> tuple[int, int]:
    """Return the number of experts, and of those per token. Raises ModelError for unsupported routers."""
    for key in OTHER_ROUTERS:
        if fields.raw.get(key) not in (None, 0, False):
            raise fields.error(
                f"{key} {fields.raw[key]!r} asks for another router than a softmax over all experts, which "
                "is the only one of this architecture"
            )
    # Transformers 5 uses the name num_local_experts in its own code, and may write it.
    key = "num_local_experts" if fields.raw.get("num_experts") is None else "num_experts"
    return selected_of(fields, key)


def selected_of(fields: Fields, key: str, selected: str = "num_experts_per_tok") -> tuple[int, int]:
    """Return the number of experts under these keys, and of those per token. Raises ModelError."""
    count, per_token = fields.integer(key, most=MAX_EXPERTS), fields.integer(selected)
    if per_token > count:
        raise fields.error(f"{selected} {per_token} is more than {key} {count}")
    return count, per_token


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.layer_numbers("mlp_only_layers", fields.raw.get("mlp_only_layers") or [], layers)
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def refuse_other_minimax(fields: Fields) -> None:
    has_norms = fields.flag("use_qk_norm", default=True)
    if not has_norms or fields.text("qk_norm_type", "per_layer") != "per_layer":
        raise fields.error("only a qk_norm_type of 'per_layer' is supported")
    if set(fields.raw.get("attn_type_list") or [1]) != {1}:
        raise fields.error("attn_type_list names layers of linear attention, which are not supported")
    if fields.raw.get("shared_intermediate_size"):
        raise fields.error("shared_intermediate_size is not supported")
