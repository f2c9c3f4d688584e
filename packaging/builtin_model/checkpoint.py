"""Training that can be paused: weights, optimiser state and step in one safetensors file."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """`step`: the next one to do. The file appears in one move."""
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{number}.{name}": value for name, value in state.items()}
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"step": str(step)})
    part.replace(path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on with."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    parameters = dict(model.named_parameters())
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118 - not a dict
            kind, rest = key.split(".", 1)
            if kind == "model":
                parameters[rest].data.copy_(file.get_tensor(key))
            else:
                number, name = rest.split(".")
                state.setdefault(int(number), {})[name] = file.get_tensor(key)
        step = int(file.metadata()["step"])
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return step
