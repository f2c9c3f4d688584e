"""How close kernels must come to an exact result, by dtype."""

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
}


def assert_near(got: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` is float64; one rounding to the dtype and a few in between are allowed."""
    torch.testing.assert_close(got.double(), exact, **TOLERANCE[got.dtype])
