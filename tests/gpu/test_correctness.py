"""What `make gpu-check` checks on a GPU, here in Triton's interpreter on tiny shapes."""

import pytest
import torch

from gpu.checks import Check, Setting
from gpu.correctness import all_checks
from support.triton_interpreter import turn_on

turn_on()


def test_all_checks_pass_on_tiny_shapes() -> None:
    setting = Setting(torch.device("cpu"), (torch.float32,), tiny=True, seed=int(torch.randint(1 << 30, ())))
    checks = [check for group in all_checks(setting) for check in group()]
    assert len(checks) > 25
    assert not [check for check in checks if not check.passed], setting.seed


@pytest.mark.parametrize("error", [0.2, float("nan"), float("inf")])
def test_a_wrong_result_fails(error: float) -> None:
    assert not Check("x", error, 0.1).passed
