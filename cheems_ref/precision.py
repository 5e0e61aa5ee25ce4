"""Autocast off, where a rounding error would change a choice and not only a digit.

Under autocast torch rounds the inputs of every matrix product to sixteen bits, whatever dtype the
code around it has cast them to. A router then picks other experts, and a mask hides other keys.
"""

import contextlib

import torch


def autocast_off(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which products on this device keep the dtype of their inputs."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()  # the meta device has no autocast
