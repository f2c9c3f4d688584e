"""What `make gpu-check` checks on a GPU, here in Triton's interpreter on tiny shapes."""

import pytest
import torch

from gpu.checks import Check, Setting
from gpu.correctness import alike, all_checks, unequal_numbers
from support.triton_interpreter import turn_on

turn_on()


def test_all_checks_pass_on_tiny_shapes() -> None:
    setting = Setting(torch.device("cpu"), (torch.float32,), tiny=True, seed=int(torch.randint(1 << 30, ())))
    checks = [check for group in all_checks(setting) for check in group.run()]
    assert len(checks) > 25
    assert not [check for check in checks if not check.passed], setting.seed
    assert not [check for check in checks if check.note], "two kernels, the same bits"


@pytest.mark.parametrize("error", [0.2, float("nan"), float("inf")])
def test_a_wrong_result_fails(error: float) -> None:
    assert not Check("x", error, 0.1).passed


def test_bits_that_differ_are_told_and_numbers_that_do_fail() -> None:
    rows = torch.ones(3, 100)
    near, far = rows.clone(), rows.clone()
    near[1, 2] += 1e-6
    far[1, 2] += 1
    assert unequal_numbers(near, rows) == 1
    one, other = alike("near", near, rows, 1e-5), alike("far", far, rows, 1e-5)
    assert (one.passed, one.note) == (True, "differs in the bits of 1 numbers")
    assert not other.passed
    assert alike("same", rows, rows, 0.0).note == ""


def test_groups_have_names() -> None:
    setting = Setting(torch.device("cpu"), (torch.float32,), tiny=True, seed=1)
    names = [group.name for group in all_checks(setting)]
    assert len(set(names)) == len(names)
    assert {"attention float32", "fp8 products float32", "adapters of experts float32"} <= set(names)
