"""Mixture-of-experts part of config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .fields import Fields

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
"""Keys of routers that are not supported: they select or combine experts in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts with a softmax router: the top `per_token` experts are summed with their weights."""

    count: int
    """Number of experts of a layer."""
    per_token: int
    """Number of experts that each token selects."""
    inner: int
    """Intermediate size of an expert: rows of its gate and up projections."""
    normalised: bool
    """True if the routing weights of the selected experts are normalized to sum to one."""
    layers: tuple[bool, ...]
    """True for each layer with experts; the others have an MLP."""
    module: str = "mlp"
    """Name of the MoE module inside a layer of the checkpoint."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's gate, up and down projections in the checkpoint, without `.weight`."""

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    def parameters(self, hidden: int) -> int:
        """Return the number of parameters of a layer's router and experts."""
        return self.count * hidden * (1 + 3 * self.inner)


ExpertRule = Callable[[Fields, int], ExpertsConfig | None]
"""Rule (config.json, number of layers) -> experts; None for a model without. Raises ModelError."""


def no_experts(_fields: Fields, _layers: int) -> None:
    return None


def mixtral_experts(fields: Fields, layers: int) -> ExpertsConfig:
    count, per_token = count_experts(fields)
    inner, chosen = fields.integer("intermediate_size"), (True,) * layers
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=inner,
        normalised=True,
        layers=chosen,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )


def qwen3_moe_experts(fields: Fields, layers: int) -> ExpertsConfig | None:
    count, per_token = count_experts(fields)
    found = ExpertsConfig(
        count=count,
        per_token=per_token,
        inner=fields.integer("moe_intermediate_size"),
        normalised=fields.flag("norm_topk_prob", default=False),
        layers=sparse_layers(fields, layers),
    )
    return found if any(found.layers) else None


def count_experts(fields: Fields) -> tuple[int, int]:
    """Return the number of experts, and of those per token. Raises ModelError for unsupported routers."""
    for key in OTHER_ROUTERS:
        if fields.raw.get(key) not in (None, 0, False):
            raise fields.error(
                f"{key} {fields.raw[key]!r} asks for another router than a softmax over all experts, which "
                "is the only one here"
            )
    # Transformers 5 uses the name num_local_experts in its own code, and may write it.
    key = "num_local_experts" if fields.raw.get("num_experts") is None else "num_experts"
    count, per_token = fields.integer(key, most=MAX_EXPERTS), fields.integer("num_experts_per_tok")
    if per_token > count:
        raise fields.error(f"num_experts_per_tok {per_token} is more than {key} {count}")
    return count, per_token


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return True for each layer with experts: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense: Any = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < layers for layer in dense):
        raise fields.error(f"mlp_only_layers must be a list of layers below {layers}")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
