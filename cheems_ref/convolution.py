"""The short convolution: it mixes each channel over its last few tokens and skips padding.

Mamba-1 has it before its scan, and SSD with position="conv" before its recurrence. Wrong shapes and
dtypes raise ValueError with the name of the argument, its axes and its sizes (check.py).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from cheems_ref import check


def short_convolution(
    u: Float[Tensor, "b l d"],
    weight: Float[Tensor, "d d_conv"],
    *,
    padding_mask: Bool[Tensor, "b l"] | None = None,
    history: Float[Tensor, "b d_conv-1 d"] | None = None,
) -> tuple[Float[Tensor, "b l d"], Float[Tensor, "b d_conv-1 d"]]:
    """Return silu(Σ_i weight_i u_{t+i+1-d_conv}) and the history for the next call.

    Args:
        u: the channels, which do not mix.
        weight: the taps of each channel; the last tap is for the newest token.
        padding_mask: True for real tokens; None for all. A real token sees the real tokens before
            it; at padding the result is undefined.
        history: the real tokens before this call, oldest first, in the dtype of u; None for zeros.

    Source: WM §2, "Conv1d + D" of Table 1; laid out as in mamba-ssm's Mamba2, without bias.
    """
    check.floating(u=u, weight=weight)
    n = check.shapes(u=(u, "b l d"), weight=(weight, "d d_conv"))
    check.sizes(d_conv=n["d_conv"])
    check.padding_mask(n, padding_mask)
    past = n["b"], n["d_conv"] - 1, n["d"]
    check.shapes(n | {"d_conv-1": past[1]}, history=(history, "b d_conv-1 d"))
    check.dtypes([u.dtype], history=history)
    if history is None:
        history = u.new_zeros(past)
    if padding_mask is None:
        u = torch.cat([history, u], dim=1)
        history = u[:, n["l"] :].clone()  # a view would keep all of u in memory
    else:
        u = u.masked_fill(~padding_mask[..., None], 0)
        # Real tokens move to the front, in their order (stable), so they follow the history
        # directly. The argsort of a permutation is its inverse: it puts the outputs back below.
        order = padding_mask.logical_not().byte().argsort(dim=1, stable=True)
        u = torch.cat([history, u.gather(1, order[..., None].expand_as(u))], dim=1)
        # With r real tokens, the newest d_conv - 1 start at place r.
        newest = padding_mask.sum(1, keepdim=True) + torch.arange(past[1], device=u.device)
        history = u.gather(1, newest[..., None].expand(past))
    wide = torch.promote_types(u.dtype, torch.float32)
    taps = (w.to(wide) * u[:, i : i + n["l"]] for i, w in enumerate(weight.unbind(1)))
    y = F.silu(sum(taps)).to(u.dtype)
    if padding_mask is not None:
        y = y.gather(1, order.argsort(dim=1)[..., None].expand_as(y))
    return y, history
