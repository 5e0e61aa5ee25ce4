"""Turn autocast off where a rounding error would change a decision and not only a digit.

Under autocast torch rounds the inputs of every matrix product to sixteen bits, even after an
explicit cast to float32. A router would then pick other experts, and a mask hide other keys.
"""

import contextlib

import torch


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context manager that makes products on this device keep their inputs' dtype."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()  # the meta device has no autocast
