from torch import Tensor

from ..model_config.config import ModelConfig
from ..weights.source import Weights


def norm_weight(config: ModelConfig, weights: Weights, name: str, size: int) -> Tensor:
    """What a norm multiplies by.

    Gemma keeps w and multiplies by 1 + w, which has more bits than the dtype of w: it is kept in float32.
    """
    weight = weights.vector(f"{name}.weight", size)
    return 1 + weight.float() if config.norms_add_one else weight
