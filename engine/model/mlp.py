"""MLP of a layer: gated, or a mixture of experts (MoE).

T rows, E hidden, X experts.
"""

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as torch_functional

from llmbox.kernels.activation import UNGATED, XIELU, Activation, LimitedSwiGLU
from llmbox.kernels.op_types import ExpertOwners, ExpertResults, Mixture, Routing
from llmbox.kernels.ops import Ops, PackedLinear

from ..checkpoint.safetensors import ShardSlice
from ..model_config.config import ModelConfig
from ..model_config.moe import ExpertsConfig
from ..weights.source import Weights


class GatedMLP:
    """Gated MLP: down(activation(gate(x)) * up(x)); gate and up are one stacked linear. Without a gate:
    down(activation(up(x))).
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, inner: int | None = None, limit: float = 0.0
    ) -> None:
        """Read the MLP of `inner` rows; None: those of the config's MLPs. `limit`: that of gates, or 0."""
        self.ops = ops
        self.rank = weights.rank
        self.activation: Activation | LimitedSwiGLU | XIELU = limited(config.activation, limit)
        hidden, ffn = ShardSlice.whole(config.hidden_size), self.rank.part(inner or config.intermediate_size)
        bias = config.mlp_bias
        names = ("up_proj",) if config.activation in UNGATED else ("gate_proj", "up_proj")
        self.input = self.gate_up = weights.linear(dict.fromkeys(names, ffn), hidden, bias=bias)
        self.down = weights.linear({"down_proj": hidden}, ffn, bias=bias)
        if config.activation == "xielu":
            self.activation = _read_xielu(weights.at("act_fn"))
        self.sub_norm_F: Tensor | None = None
        self._gate_mul = ops.before(self.down).gate_mul
        if config.has_sub_norms:
            self.sub_norm_F, self.eps = weights.vector("ffn_sub_norm.weight", ffn.size), config.rms_norm_eps
            self._gate_mul = ops.gate_mul
        self.scales_2F: Tensor | None = None
        if config.scales.mlp is not None:
            gate, down = config.scales.mlp
            self.scales_2F = torch.tensor([gate, 1.0], device=weights.device).repeat_interleave(ffn.size)
            self.scales_E = torch.full((config.hidden_size,), down, device=weights.device)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return partial results for `TensorParallel.add_rms_norm`, [T, E]."""
        out_TE = self.rank.row_parallel_linear(self.ops, self.down, self.inner(x_TE), x_TE.shape[1])
        return out_TE if self.scales_2F is None else self._scale(out_TE, self.scales_E)

    def inner(self, x_TE: Tensor) -> Tensor:
        """Return the input of `down`, this rank's [T, F]."""
        gate_up = self.ops.linear(self.gate_up, x_TE)
        if self.scales_2F is not None:
            gate_up = self._scale(gate_up, self.scales_2F)
        inner_TF = self._gate_mul(gate_up, self.activation)
        if self.sub_norm_F is None:
            return inner_TF
        return self.ops.before(self.down).rms_norm(inner_TF, self.sub_norm_F, self.eps)

    def _scale(self, x_TN: Tensor, by_N: Tensor) -> Tensor:
        assert self.ops.recurrent is not None
        return self.ops.recurrent.mul_add(x_TN, by_N, None)


def limited(activation: Activation, limit: float) -> Activation | LimitedSwiGLU:
    assert not limit or activation == "silu"
    return LimitedSwiGLU(limit) if limit else activation


class SharedMLP(GatedMLP):
    """MLP of a block that several layers share, whose gates and ups have adapters of each."""

    narrow: PackedLinear
    widen: PackedLinear
    ones_2F: Tensor

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        inner = config.intermediate_size
        weights.split("gate_up_proj", {"gate_proj": inner, "up_proj": inner})
        super().__init__(config, weights, ops)

    def for_use(self, config: ModelConfig, weights: Weights, layer: int) -> "SharedMLP":
        """Return the same MLP in another layer, with its adapters."""
        assert config.shared is not None
        found, name = copy(self), f"gate_up_proj_adapter_list.{config.shared.layers.index(layer)}"
        inner, rank = self.rank.part(config.intermediate_size), ShardSlice.whole(config.shared.rank)
        weights.split(f"{name}.1", {f"{name}.{part}": inner.total for part in ("gate", "up")})
        found.narrow = weights.linear({f"{name}.0": rank}, ShardSlice.whole(config.hidden_size), bias=False)
        found.widen = weights.linear({f"{name}.gate": inner, f"{name}.up": inner}, rank, bias=False)
        found.ones_2F = torch.ones(2 * inner.size, device=weights.device)
        return found

    def inner(self, x_TE: Tensor) -> Tensor:
        ops = self.ops
        assert ops.recurrent is not None
        adapted_T2F = ops.linear(self.widen, ops.linear(self.narrow, x_TE))
        # A copy, as the next linear may give its result where this one has.
        adapted_T2F = ops.recurrent.mul_add(adapted_T2F, self.ones_2F, None)
        gate_up_T2F = ops.recurrent.mul_add(ops.linear(self.gate_up, x_TE), self.ones_2F, adapted_T2F)
        return self._gate_mul(gate_up_T2F, self.activation)


_XIELU_TENSORS = "alpha_p", "alpha_n", "beta", "eps"


def _read_xielu(weights: Weights) -> XIELU:
    """Read a layer's numbers; the alphas are stored as what softplus maps to them."""
    alpha_p, alpha_n, beta, eps = (float(weights.floats(name, 1)) for name in _XIELU_TENSORS)
    return XIELU(_softplus(alpha_p), beta + _softplus(alpha_n), beta, eps)


def _softplus(x: float) -> float:
    return float(torch_functional.softplus(torch.tensor(x, dtype=torch.float64)))


class SparseMoE:
    """Top-k routing: each row passes through its k best experts, weighted by their router scores, and through
    the shared expert if there is one.

    With tensor parallelism each rank has a slice of every expert's intermediate rows, as of an MLP's; with
    expert parallelism some experts whole. Then too every rank has all rows. Where the kernels can, ranks
    exchange the results of single experts, and each adds them up as one rank would, whoever has computed
    which. Elsewhere results are all-reduced.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ExpertsConfig,
        weights: Weights,
        ops: Ops,
        limits: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """`limits`: of the gates of experts, and of the shared one; 0: none."""
        self.ops = ops
        self.rank = weights.rank
        whole, count = ShardSlice.whole(model.hidden_size), ShardSlice.whole(config.count)
        self.input = self.router = weights.router(config.router, count, whole, bias=config.has_bias)
        layout, layer, on_cpu = self.rank.layout, len(weights.mixtures), weights.device.type == "cpu"
        held, owners = list(layout.experts(config.count, layer)), None
        gate_ups, downs = _expert_linears(config, held, config.latent or model.hidden_size, weights, ops)
        self.narrow, self.widen = None, None
        if config.latent:
            latent = ShardSlice.whole(config.latent)
            self.narrow = weights.linear({"fc1_latent_proj": latent}, whole, bias=False)
            self.widen = weights.linear({"fc2_latent_proj": whole}, latent, bias=False)
            self.ones_E = torch.ones(model.hidden_size, device=weights.device)
        if layout.expert_parallel and ops.expert_results is not None:
            load_R = torch.zeros(layout.tp, dtype=torch.int64) if on_cpu else None
            owners = ExpertOwners(layout.holders(config.count, layer), layout.tp_rank, layout.tp, load_R)
        self.mixture = Mixture(
            gate_ups,
            downs,
            count=config.count,
            per_token=config.per_token,
            normalized=config.normalized,
            routing=_routing(config, weights, on_host=ops.host_experts is not None),
            activation=limited(model.activation, limits[0]),
            held=None if len(held) == config.count else held,
            load_X=torch.zeros(config.count, dtype=torch.int64) if on_cpu else None,
            owners=owners,
        )
        self.shared, self.shared_gate = None, None
        if config.shared_inner:
            shared = weights.at(config.shared)
            self.shared = GatedMLP(model, shared, ops, config.shared_inner, limits[1])
        if config.has_shared_gate:
            self.shared_gate = weights.router(f"{config.shared}_gate", ShardSlice.whole(1), whole)
        routers = [each for each in (self.router, self.shared_gate) if each is not None]
        if config.averages:  # a gate of 0, whose sigmoid is a half
            zeros_1E = torch.zeros(1, model.hidden_size, dtype=weights.dtype, device=weights.device)
            self.shared_gate = ops.pack_router(zeros_1E, None)
        turned = config.stacked is not None and config.stacked.turns_adapters
        weights.note_experts("experts", self.mixture, routers, turned=turned)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return partial results for `TensorParallel.add_rms_norm`, [T, E]."""
        return self.mix(x_TE, self.ops.logits(self.router, x_TE))

    def mix(self, x_TE: Tensor, logits_TX: Tensor) -> Tensor:
        """Do as `__call__`, with logits of the router."""
        ops = self.ops
        if ops.send_expert_inputs is not None and self.narrow is None:
            ops.send_expert_inputs(x_TE, logits_TX)
        shared_TE = None if self.shared is None else ops.linear(self.shared.down, self.shared.inner(x_TE))
        gate_T1 = None if self.shared_gate is None else ops.logits(self.shared_gate, x_TE)
        if self.narrow is None or self.widen is None:
            if self.mixture.owners is not None:
                return self._combine(self._exchange(x_TE, logits_TX), shared_TE, gate_T1)
            out_TE = ops.experts(self.mixture, x_TE, logits_TX, shared_TE, gate_T1)
            return self.rank.reduce_partial(ops, out_TE)
        assert ops.recurrent is not None
        assert shared_TE is not None
        # `widen` gives its result where `shared_TE` may be.
        out_TE = shared_TE = ops.recurrent.mul_add(shared_TE, self.ones_E, None)
        out_TL = self._mix_narrow(ops.linear(self.narrow, x_TE), logits_TX)
        if out_TL is not None:
            out_TE = ops.recurrent.mul_add(ops.linear(self.widen, out_TL), self.ones_E, shared_TE)
        return self.rank.reduce_partial(ops, out_TE)

    def _mix_narrow(self, x_TL: Tensor, logits_TX: Tensor) -> Tensor | None:
        """Return this rank's part of the experts' sum, before `widen`; None: another rank has all of it."""
        if self.mixture.owners is None:
            return self.ops.experts(self.mixture, x_TL, logits_TX)
        results = self._exchange(x_TL, logits_TX)
        assert self.ops.combine_experts is not None
        return self.ops.combine_experts(results) if self.rank.layout.tp_rank == 0 else None

    def _exchange(self, x_TE: Tensor, logits_TX: Tensor) -> ExpertResults:
        """Return the results of all experts that rows chose, whichever rank computed them."""
        assert self.ops.expert_results is not None
        results = self.ops.expert_results(self.mixture, x_TE, logits_TX)
        exchanged = results.rows_TKE, results.owners_TK
        self.ops.host_callback(self.rank.communicator.exchange_rows, exchanged)
        return results

    def _combine(self, results: ExpertResults, shared_TE: Tensor | None, gate_T1: Tensor | None) -> Tensor:
        """Add up. A shared expert is cut among the ranks as an MLP is: rank 0 adds its part to the experts'
        sum, and the sums of ranks are added.
        """
        combine = self.ops.combine_experts
        assert combine is not None
        if shared_TE is None:
            return self.rank.as_partial(combine(results))
        is_first = self.rank.layout.tp_rank == 0
        out_TE = combine(results if is_first else None, shared_TE, gate_T1)
        return self.rank.reduce_partial(self.ops, out_TE)


class NormedMoE:
    """Mixture of experts whose sum is normed (A.X K1)."""

    def __init__(self, moe: SparseMoE, norm_E: Tensor, eps: float) -> None:
        self.moe, self.input = moe, moe.input
        self.norm_E, self.eps = norm_E, eps

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return partial results for `TensorParallel.add_rms_norm`, [T, E]."""
        ops, rank = self.moe.ops, self.moe.rank
        out_TE = rank.finish_all_reduce(ops, self.moe(x_TE))
        return rank.as_partial(ops.rms_norm(out_TE, self.norm_E, self.eps))


def _routing(config: ExpertsConfig, weights: Weights, *, on_host: bool) -> Routing:
    def read(name: str) -> Tensor | None:
        numbers_X = weights.floats(name, config.count) if name else None
        return numbers_X.cpu() if numbers_X is not None and on_host else numbers_X

    return Routing(
        scoring=config.scoring,
        scale=config.scale,
        groups=config.groups,
        top_groups=config.top_groups,
        group_best=config.group_best,
        correction_X=read(config.correction),
        jitter=config.jitter,
        factors_X=read(config.factors),
        scales_inputs=config.scales_inputs,
    )


def _expert_linears(
    config: ExpertsConfig, held: Sequence[int], hidden: int, weights: Weights, ops: Ops
) -> tuple[list[Any], list[Any]]:
    """Return the packed gates and ups, and the packed downs: one of each for every expert of `held`, or for
    all.
    """
    whole, inner = ShardSlice.whole(hidden), weights.rank.layout.inside_expert(config.inner)
    is_single, on_host = ops.pack_experts is not None, ops.host_experts is not None
    gate, up, down = config.projections
    is_paired = config.stacked is not None and config.stacked.is_interleaved
    if config.stacked is not None:
        _split_tensors(config, weights)
    if len(held) < config.count:
        weights.skip_experts("experts", held)
    here = [f"experts.{expert}" for expert in held]
    if config.stacked is not None and not (config.stacked.is_interleaved or config.stacked.gate):
        for name in here:
            weights.split(
                f"{name}.gate_up_proj", {f"{name}.{gate}": config.inner, f"{name}.{up}": config.inner}
            )
    gate_ups, downs = [], []
    for group in [here] if is_single else [[name] for name in here]:
        order = None
        if is_paired:
            # A rank's gates and ups are neighbors: its slice of both is one of twice the rows.
            pairs = ShardSlice(2 * inner.total, 2 * inner.start, 2 * inner.stop)
            rows = {f"{name}.gate_up_proj": pairs for name in group}
            order = _apart(len(group), pairs.size)
        else:
            rows = {f"{name}.{part}": inner for name in group for part in (gate, up) if part}
        bias = config.has_bias
        read = partial(weights.linear, bias=bias, experts=is_single, on_host=on_host)
        gate_ups.append(read(rows, whole, order=order))
        rows = {f"{name}.{down}": whole for name in group}
        downs.append(read(rows, inner))
    return gate_ups, downs


def _split_tensors(config: ExpertsConfig, weights: Weights) -> None:
    """Split the tensors of all experts of a layer into one for each expert."""
    stacked, (gate, up, down) = config.stacked, config.projections
    assert stacked is not None
    parts = {stacked.gate: gate, stacked.up: up} if stacked.gate else {stacked.gate_up: "gate_up_proj"}
    for stored, part in (parts | {stacked.down: down}).items():
        names = [f"experts.{expert}.{part}" for expert in range(config.count)]
        weights.split_experts(stored, names, transposed=stacked.is_transposed)


def _apart(experts: int, rows: int) -> tuple[int, ...]:
    """Return the order that puts the gates of each expert before its ups, which alternate."""
    return tuple(
        expert * rows + row for expert in range(experts) for half in (0, 1) for row in range(half, rows, 2)
    )
