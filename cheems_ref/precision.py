"""Choices in float32, where a rounding error would change a decision and not only a digit.

Under autocast torch rounds the inputs of every matrix product to sixteen bits, even after an
explicit cast to float32. A model in sixteen bits rounds every result as well. A router would then
pick other experts, and a mask hide other keys.
"""

import contextlib

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context manager that makes products on this device keep their inputs' dtype."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()  # the meta device has no autocast


class Float32Linear(nn.Linear):
    """A linear map without bias that is computed in float32, or in float64 if its weights are.

    Its weights may be in sixteen bits, x may be, and autocast may be on: y = x Wᵀ is that of the
    numbers given, rounded to float32. Routers and masks use it, because they choose by y. torch's
    quantize_dynamic replaces `nn.Linear` alone, so it leaves this layer as it is.

    Args:
        in_features: d, the width of x.
        out_features: e, the width of y.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b e"]:
        """Compute y, in float32 or float64."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with autocast_off(x.device):
            return F.linear(x.to(wide), self.weight.to(wide))
