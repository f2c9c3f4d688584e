from torch import Tensor


def softcap(logits_RV: Tensor, cap: float) -> Tensor:
    """In float32, rounded once."""
    return ((logits_RV.float() / cap).tanh_() * cap).to(logits_RV.dtype)
