"""Elementwise operations, norms, RoPE and linears in plain torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation import SWIGLU_ALPHA, SWIGLU_LIMIT, UNGATED, XIELU, Activation, LimitedSwiGLU
from ..op_types import AltUpOps

VECTOR = 64
"""Multiple of the numbers that torch computes as one vector, in every dtype and on every processor."""


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """Unpacked weights [O, I] and bias [O] of a linear."""

    weight_OI: Tensor
    bias_O: Tensor | None


def pack_linear(weight_OI: Tensor, bias_O: Tensor | None) -> ReferenceLinear:
    return ReferenceLinear(weight_OI, bias_O)


def weight_memory(packed: ReferenceLinear) -> list[Tensor]:
    tensors = (packed.weight_OI, packed.bias_O)
    return [each.view(-1).view(torch.uint8) for each in tensors if each is not None]


# MKL sums the rows of small products in another order than those of large ones: seen for every row count
# below 12 except 4 and 8 (AVX512). Padding to 8 keeps "one row, one result" in float32.
MIN_ROWS = 8
MKL_ODD_ROWS = 12


def linear(packed: ReferenceLinear, x_TI: Tensor) -> Tensor:
    """Compute x @ weight.T + bias. A row has the same bits for any number of rows on a CPU in float32: see
    MIN_ROWS.
    """
    rows = x_TI.shape[0]
    if x_TI.device.type != "cpu" or x_TI.dtype != torch.float32 or rows >= MKL_ODD_ROWS or rows == MIN_ROWS:
        return F.linear(x_TI, packed.weight_OI, packed.bias_O)
    padded = MIN_ROWS if rows < MIN_ROWS else MKL_ODD_ROWS
    return F.linear(F.pad(x_TI, (0, 0, 0, padded - rows)), packed.weight_OI, packed.bias_O)[:rows]


def concat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=2)


def make_linear_by_head(
    linear: Callable[[Any, Tensor], Tensor],
) -> Callable[[Sequence[Any], Tensor], Tensor]:
    """Build `Ops.linear_by_head` on these linears."""

    def linear_by_head(packed: Sequence[Any], x_THI: Tensor) -> Tensor:
        return torch.stack([linear(each, x_THI[:, head]) for head, each in enumerate(packed)], dim=1)

    return linear_by_head


def pack_embedding(weight_VE: Tensor, tied: bool) -> ReferenceLinear:  # noqa: ARG001 - one layout serves both uses
    return ReferenceLinear(weight_VE, None)


def embedding(table: ReferenceLinear, ids_T: Tensor, scale: float = 1.0) -> Tensor:
    """Look up rows of the table, times `scale`."""
    rows_TE = F.embedding(ids_T, table.weight_OI)
    return rows_TE if scale == 1.0 else rows_TE.mul_(scale)


def gate_mul(gate_up_T2F: Tensor, activation: Activation | LimitedSwiGLU | XIELU) -> Tensor:
    """Compute activation(gate) * up, each step rounded to the model's dtype; xIELU is rounded once."""
    if isinstance(activation, XIELU):
        return _xielu(gate_up_T2F, activation)
    if isinstance(activation, LimitedSwiGLU):
        gate, up = gate_up_T2F.chunk(2, dim=-1)
        limit = activation.limit
        return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))
    if activation in UNGATED:
        return _ungated(gate_up_T2F, activation)
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        # torch's sigmoid rounds otherwise behind the last whole vector: padding keeps rows independent.
        width = gate.shape[-1]
        share = F.pad(gate * SWIGLU_ALPHA, (0, -width % VECTOR)).sigmoid_()[..., :width]
        return (share * gate).mul_(up + 1)
    if activation == "relu2_gated":
        return gate.relu().square_().mul_(up)
    if activation == "gelu_gated":
        return _ungated(gate, "gelu").mul(up)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)


def _ungated(x_TF: Tensor, activation: Activation) -> Tensor:
    if activation in {"relu", "relu2"}:
        y_TF = x_TF.relu()
        return y_TF if activation == "relu" else y_TF.square_()
    width = x_TF.shape[-1]  # padded as the sigmoid above
    x_TF = F.pad(x_TF, (0, -width % VECTOR))
    return F.gelu(x_TF, approximate="none" if activation == "gelu" else "tanh")[..., :width]


def _xielu(x_TF: Tensor, numbers: XIELU) -> Tensor:
    width = x_TF.shape[-1]
    # torch's expm1 rounds otherwise behind the last whole vector, as its sigmoid.
    x = F.pad(x_TF.float() if x_TF.dtype != torch.float64 else x_TF, (0, -width % VECTOR))
    positive = numbers.alpha_p * x * x
    negative = numbers.alpha_n * (x.clamp(max=numbers.eps).expm1() - x)
    return (torch.where(x > 0, positive, negative) + numbers.beta * x)[..., :width].to(x_TF.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight. Sums are float32 whatever the dtype.

    With float32 weights the product is float32 too, and rounded once.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if weight.dtype != x.dtype:
        return rms_norm(x.float(), weight.float(), eps).to(x.dtype)
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps).mul_(weight)


def add_rms_norm(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Add x to the residual in place and norm the sum."""
    return rms_norm(residual_TE.add_(x_TE), weight_E, eps)


def layer_norm(
    x_TE: Tensor, residual_TE: Tensor | None, weight_E: Tensor, eps: float, bias_E: Tensor | None = None
) -> Tensor:
    """Add x to the residual in place, if there is one, and norm the sum in float32."""
    y = x_TE if residual_TE is None else residual_TE.add_(x_TE)
    bias = None if bias_E is None else bias_E.float()
    return F.layer_norm(y.float(), weight_E.shape, weight_E.float(), bias, eps).to(x_TE.dtype)


def rotary(x_TnD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate in float32: bfloat16 angles would blur positions that are far apart.

    Su et al., "RoFormer", 2021; halves layout of GPT-NeoX and Hugging Face checkpoints.
    """
    half = x_TnD.shape[-1] // 2
    y = x_TnD.float()
    swapped = torch.cat((y[..., half:], y[..., :half]), -1)
    return (y * cos_TD.unsqueeze(1)).addcmul_(swapped, sin_TD.unsqueeze(1)).to(x_TnD.dtype)


def softcap(logits_RV: Tensor, cap: float) -> Tensor:
    """Compute cap * tanh(logits / cap) in float32, rounded once."""
    return ((logits_RV.float() / cap).tanh_() * cap).to(logits_RV.dtype)


def _predict(x: Tensor, routed_TN: Tensor, coefs_JN: Tensor) -> Tensor:
    streams = routed_TN.shape[1]
    x_TNE = x.float().view(len(x), streams, -1)
    mix_TNN = (routed_TN.float().tanh() @ coefs_JN.T).view(-1, streams, streams)
    return (x_TNE + mix_TNN @ x_TNE).flatten(1).to(x.dtype)


def _correct(predicted: Tensor, x_TE: Tensor, stream: int, routed_TN: Tensor, coefs_NN: Tensor) -> Tensor:
    predicted_TNE = predicted.float().view(len(x_TE), -1, x_TE.shape[1])
    change_TE = x_TE.float() - predicted_TNE[:, stream]
    by_TN = 1 + routed_TN.float().tanh() @ coefs_NN.T
    return (predicted_TNE + by_TN.unsqueeze(2) * change_TE.unsqueeze(1)).flatten(1).to(x_TE.dtype)


def _add_to_others(x: Tensor, added_TE: Tensor) -> None:
    x.view(len(x), -1, added_TE.shape[1])[:, 1:] += added_TE.unsqueeze(1)


def _match_size(x: Tensor, like_TE: Tensor, eps: float) -> None:
    x_TME = x.view(len(x), -1, like_TE.shape[1])
    wanted = like_TE.float().square().mean(1).sqrt().view(-1, 1, 1)
    own = x_TME.float().square().mean(2, keepdim=True).clamp(min=eps).sqrt()
    x_TME.copy_(x_TME * (wanted / own))


def _gate_sums(gate_TF: Tensor) -> Tensor:
    gate = gate_TF.double()
    return torch.stack((gate.sum(1), gate.square().sum(1)), 1).float()


def _cut_gates(gate_TF: Tensor, sums_T2: Tensor, width: int, factor: float) -> None:
    means_T2 = sums_T2.double() / width
    mean_T1, square_T1 = means_T2[:, :1], means_T2[:, 1:]
    cutoff = mean_T1 + factor * (square_T1 - mean_T1.square()).clamp(min=0).sqrt()
    gate_TF.copy_(F.relu(gate_TF.float() - cutoff.float()))


ALTUP = AltUpOps(_predict, _correct, _add_to_others, _match_size, _gate_sums, _cut_gates)
"""Rows of several streams, and gates of which few stay (Gemma 3n). N streams of a row, one after another."""
