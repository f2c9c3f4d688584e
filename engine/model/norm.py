from torch import Tensor

from ..model_config.config import ModelConfig
from ..weights.source import Weights


def norm_weight(config: ModelConfig, weights: Weights, name: str, size: int) -> Tensor:
    """Read the weight [size] by which an RMSNorm multiplies.

    Gemma stores w and multiplies by 1 + w, which needs more bits than the dtype of w: the sum is kept in
    float32.
    """
    weight = weights.vector(f"{name}.weight", size)
    return 1 + weight.float() if config.norms_add_one else weight
