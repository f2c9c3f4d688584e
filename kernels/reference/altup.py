"""Reference of `AltUpOps`: rows of several streams, and gates of which few stay (Gemma 3n).

T rows of the step, N streams of a row, E hidden, F rows of an MLP. A row is [N E]: one stream after another.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..op_types import AltUpOps


def predict(x: Tensor, routed_TN: Tensor, coefs_JN: Tensor) -> Tensor:
    streams = routed_TN.shape[1]
    x_TNE = x.float().view(len(x), streams, -1)
    mix_TNN = (routed_TN.float().tanh() @ coefs_JN.T).view(-1, streams, streams)
    return (x_TNE + mix_TNN @ x_TNE).flatten(1).to(x.dtype)


def correct(predicted: Tensor, x_TE: Tensor, stream: int, routed_TN: Tensor, coefs_NN: Tensor) -> Tensor:
    predicted_TNE = predicted.float().view(len(x_TE), -1, x_TE.shape[1])
    change_TE = x_TE.float() - predicted_TNE[:, stream]
    by_TN = 1 + routed_TN.float().tanh() @ coefs_NN.T
    return (predicted_TNE + by_TN.unsqueeze(2) * change_TE.unsqueeze(1)).flatten(1).to(x_TE.dtype)


def add_to_others(x: Tensor, added_TE: Tensor) -> None:
    x.view(len(x), -1, added_TE.shape[1])[:, 1:] += added_TE.unsqueeze(1)


def match_size(x: Tensor, like_TE: Tensor, eps: float) -> None:
    x_TME = x.view(len(x), -1, like_TE.shape[1])
    wanted = like_TE.float().square().mean(1).sqrt().view(-1, 1, 1)
    own = x_TME.float().square().mean(2, keepdim=True).clamp(min=eps).sqrt()
    x_TME.copy_(x_TME * (wanted / own))


def gate_sums(gate_TF: Tensor) -> Tensor:
    gate = gate_TF.double()
    return torch.stack((gate.sum(1), gate.square().sum(1)), 1).float()


def cut_gates(gate_TF: Tensor, sums_T2: Tensor, width: int, factor: float) -> None:
    means_T2 = sums_T2.double() / width
    mean_T1, square_T1 = means_T2[:, :1], means_T2[:, 1:]
    cutoff = mean_T1 + factor * (square_T1 - mean_T1.square()).clamp(min=0).sqrt()
    gate_TF.copy_(F.relu(gate_TF.float() - cutoff.float()))


ALTUP = AltUpOps(predict, correct, add_to_others, match_size, gate_sums, cut_gates)
"""The operations in plain torch."""
