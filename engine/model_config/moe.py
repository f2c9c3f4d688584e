"""Mixture-of-experts part of config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

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
    gate: str = ""
    up: str = ""
    """Tensors of gates and of ups, in place of `gate_up`; empty: there are none."""
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
LayersRule = Callable[[Fields, int], tuple[bool, ...]]
"""Rule (config.json, number of layers) -> True for each layer with experts."""


def read_experts(
    selected: Callable[[Fields], tuple[int, int]],
    layers: LayersRule | None = None,
    inner: str = "moe_intermediate_size",
    without: Mapping[str, object] | None = None,
    **values: Any,
) -> ExpertRule:
    """Return a rule that reads experts, or None if no layer has some.

    `selected`: reads the experts of a layer, and those of a token. `layers`: None for all. `inner`: key of an
    expert's intermediate size. `without`: values of config.json of a model without experts. `values`: other
    fields of `ExpertsConfig`, or functions that read them.
    """

    def read(fields: Fields, count: int) -> ExpertsConfig | None:
        if any(fields.raw.get(key) == value for key, value in (without or {}).items()):
            return None
        sparse = (True,) * count if layers is None else layers(fields, count)
        total, per_token = selected(fields)
        more = {name: value(fields) if callable(value) else value for name, value in values.items()}
        found = ExpertsConfig(
            count=total,
            per_token=per_token,
            inner=fields.integer(inner),
            layers=sparse,
            **more,
        )
        return found if any(sparse) else None

    return read


def experts_with(rule: ExpertRule, **changes: Any) -> ExpertRule:
    """Return `rule` for checkpoints with other names or another layout of experts."""

    def read(fields: Fields, layers: int) -> ExpertsConfig | None:
        found = rule(fields, layers)
        return found and replace(found, **changes)

    return read


def selected_by(*keys: str, top_k: str = "num_experts_per_tok") -> Callable[[Fields], tuple[int, int]]:
    """Return a function that reads the number of experts, under the first of these keys that is there, and
    of those per token. It raises ModelError.
    """

    def read(fields: Fields) -> tuple[int, int]:
        key = next((key for key in keys if fields.raw.get(key) is not None), keys[-1])
        count, selected = fields.integer(key, most=MAX_EXPERTS), fields.integer(top_k)
        if selected > count:
            raise fields.error(f"{top_k} {selected} is more than {key} {count}")
        return count, selected

    return read


def softmax_over_all(fields: Fields) -> tuple[int, int]:
    """Read the numbers of experts. Raises ModelError for keys that ask for another router."""
    for key in OTHER_ROUTERS:
        if fields.raw.get(key) not in (None, 0, False):
            raise fields.error(
                f"{key} {fields.raw[key]!r} asks for another router than a softmax over all experts, which "
                "is the only one of this architecture"
            )
    # Transformers 5 uses the name num_local_experts in its own code, and may write it.
    return selected_by("num_experts", "num_local_experts")(fields)


def integer(key: str) -> Callable[[Fields], int]:
    return lambda fields: fields.integer(key)


def normalized_if(default: bool) -> Callable[[Fields], bool]:
    """Return a function that reads `norm_topk_prob`."""
    return lambda fields: fields.flag("norm_topk_prob", default=default)


def scaling_factor(fields: Fields) -> float:
    return fields.number("routed_scaling_factor", 1.0)


def shared_of(key: str) -> Callable[[Fields], int]:
    """Return a function that reads the intermediate size of as many shared experts as `key` says."""
    return lambda fields: fields.integer("moe_intermediate_size") * fields.integer(key, 0)


# ---------------------------------------------------------------------- layers with experts


def layers_from(first: float, layers: int) -> tuple[bool, ...]:
    return tuple(layer >= first for layer in range(layers))


def layers_after_dense(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts, by `mlp_layer_types` or after `first_k_dense_replace` ones."""
    types = fields.raw.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not set(types) <= {"dense", "sparse"}:
            raise fields.error(f"mlp_layer_types must name dense or sparse for each of {layers} layers")
        return tuple(name == "sparse" for name in types)
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.error(f"moe_layer_freq {fields.raw['moe_layer_freq']} is not supported, only 1")
    return layers_from(fields.number("first_k_dense_replace", 1), layers)


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.layer_numbers("mlp_only_layers", fields.raw.get("mlp_only_layers") or [], layers)
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def ernie_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    first, end = fields.number("moe_layer_start_index", 1), fields.number("moe_layer_end_index", -1)
    last, interval = layers - 1 if end == -1 else end, fields.integer("moe_layer_interval", 1)
    return tuple(first <= layer <= last and (layer + 1) % interval == 0 for layer in range(layers))


# ---------------------------------------------------------------------- rules

W123 = ("w1", "w3", "w2")
"""Names of the projections of Mixtral's experts."""
mixtral_experts = read_experts(
    softmax_over_all, inner="intermediate_size", normalized=True, module="block_sparse_moe", projections=W123
)
qwen3_moe_experts = read_experts(softmax_over_all, sparse_layers, normalized=normalized_if(False))
qwen2_moe_experts = read_experts(
    selected_by("num_experts"),
    sparse_layers,
    normalized=normalized_if(False),
    shared_inner=integer("shared_expert_intermediate_size"),
    has_shared_gate=True,
    shared="shared_expert",
)
lfm2_moe_experts = read_experts(
    selected_by("num_experts"),
    lambda fields, layers: layers_from(fields.number("num_dense_layers", 2), layers),
    normalized=normalized_if(True),
    scoring="sigmoid",
    scale=scaling_factor,
    correction=lambda fields: "expert_bias" if fields.flag("use_expert_bias", default=True) else "",
)
olmoe_experts = read_experts(softmax_over_all, inner="intermediate_size", normalized=normalized_if(False))
gpt_oss_experts = read_experts(
    softmax_over_all,
    inner="intermediate_size",
    normalized=True,
    has_bias=True,
    router="router",
    stacked=StackedExperts(is_transposed=True, is_interleaved=True),
)
granite_moe_experts = read_experts(
    selected_by("num_local_experts"),
    inner="intermediate_size",
    normalized=True,
    module="block_sparse_moe",
    router="router.layer",
    stacked=StackedExperts(gate_up="input_linear", down="output_linear"),
)
granite_hybrid_experts = read_experts(
    selected_by("num_local_experts"),
    inner="expert_intermediate_size",
    without={"num_local_experts": 0},
    normalized=True,
    shared_inner=integer("intermediate_size"),
    module="",
    router="block_sparse_moe.router.layer",
    shared="mlp",
    stacked=StackedExperts(gate_up="block_sparse_moe.input_linear", down="block_sparse_moe.output_linear"),
)
"""Experts beside an MLP of each layer, if there are any (`recurrent/families.py::granite_sizes`)."""
minimax_m2_experts = read_experts(
    selected_by("num_local_experts"),
    inner="intermediate_size",
    normalized=True,
    scoring="sigmoid",
    module="block_sparse_moe",
    correction="e_score_correction_bias",
    projections=W123,
)
ernie_experts = read_experts(
    selected_by("moe_num_experts", top_k="moe_k"),
    ernie_layers,
    normalized=True,
    shared_inner=shared_of("moe_num_shared_experts"),
    correction="moe_statics.e_score_correction_bias",
)


def deepseek_experts(
    fields: Fields, layers: int, rule: LayersRule = layers_after_dense, **router: Any
) -> ExpertsConfig | None:
    """Read experts in groups. Raises ModelError for groups that do not hold what they should."""
    selected = selected_by("n_routed_experts")
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    count, per_token = selected(fields)
    if count % groups or top_groups > groups or per_token > count // groups * top_groups:
        raise fields.error(
            f"{top_groups} of {groups} groups (topk_group, n_group) do not hold {per_token} of {count} "
            "experts"
        )
    if groups > 1 and count // groups < router.get("group_best", 1):
        raise fields.error(f"n_group {groups} leaves groups of one expert, which is not supported")
    usual: dict[str, Any] = {"normalized": normalized_if(True), "shared_inner": shared_of("n_shared_experts")}
    usual |= {"scale": scaling_factor, "groups": groups, "top_groups": top_groups}
    return read_experts(selected, rule, **{**usual, **router})(fields, layers)


def deepseek_v3_experts(fields: Fields, layers: int, **more: Any) -> ExpertsConfig | None:
    """Read a router of sigmoids with a correction and groups: DeepSeek V3, GLM-4-MoE."""
    _check_scoring(fields, "sigmoid")
    router = {"scoring": "sigmoid", "group_best": 2, "correction": "gate.e_score_correction_bias"}
    return deepseek_experts(fields, layers, **{**router, **more})


def deepseek_v1_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read a softmax router."""
    _check_scoring(fields, "softmax")
    return deepseek_experts(fields, layers)


def deepseek_v2_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    """Read a softmax router, with groups under a `topk_method` of `group_limited_greedy`."""
    method = fields.text("topk_method", "greedy")
    if method not in {"greedy", "group_limited_greedy"}:
        raise fields.error(f"topk_method {method!r} is not supported")
    if method == "greedy":
        fields = fields.replace(n_group=1, topk_group=1)
    # transformers never normalizes them, whatever norm_topk_prob says.
    return deepseek_v1_experts(fields.replace(norm_topk_prob=False), layers)


def _check_scoring(fields: Fields, only: str) -> None:
    if fields.text("scoring_func", only) != only:
        raise fields.error(f"scoring_func {fields.raw['scoring_func']!r} is not supported, only {only!r}")


def experts_beside_shared(layers: LayersRule | None = None, **router: Any) -> ExpertRule:
    """Return a rule that reads experts beside a shared one of a size of its own."""
    shared = integer("shared_expert_intermediate_size")
    return read_experts(
        selected_by("num_local_experts", "num_experts"), layers, shared_inner=shared, **router
    )
