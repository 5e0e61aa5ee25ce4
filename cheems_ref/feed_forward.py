"""Feed-forward layers that process every token: an MLP, and a linear unit with two gates.

They take x (..., d) and return y (..., d). f is the inner width.

    MLP            SiLU(x W) W₂
    gated MLP      (SiLU(x W) ∘ x V) W₂
    DGLU           (SiLU(x W) ∘ tanh(x V)) W₂        OTCE's expert, which has a second gate

Wrong shapes, dtypes or sizes raise ValueError, which names the argument (check.py).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from cheems_ref import check

SecondGate = Literal["tanh", "sigmoid"]


class MLP(nn.Module):
    """Two linear maps with SiLU between them, and optionally a third map as a gate.

    Args:
        d_model: d.
        d_ff: f.
        gated: whether to multiply the inner units by the SiLU of a third map.

    Source: WM eq. after (5), φ(x) = SiLU(x W)V. The gated form is Ch eq. 11; Shazeer (2020).
    """

    def __init__(self, d_model: int, d_ff: int, *, gated: bool = False):
        super().__init__()
        check.sizes(d_model=d_model, d_ff=d_ff)
        self.d_model = d_model
        self.in_proj = nn.Linear(d_model, d_ff, bias=False)
        self.gate_proj = nn.Linear(d_model, d_ff, bias=False) if gated else None
        self.out_proj = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        """Compute y from x."""
        check.width(x, self.d_model)
        check.fits_weights(x, self.in_proj)
        if self.gate_proj is None:
            return self.out_proj(F.silu(self.in_proj(x)))
        return self.out_proj(F.silu(self.gate_proj(x)) * self.in_proj(x))


class DGLU(nn.Module):
    """A linear unit with two gates: (SiLU(x W) ∘ tanh(x V)) W₂, or a sigmoid in place of tanh.

    Args:
        d_model: d.
        d_ff: f.
        gate: the second activation.
        own_V: False for a unit without V, whose caller computes x V.

    Source: OTCE eq. 13.
    """

    def __init__(self, d_model: int, d_ff: int, *, gate: SecondGate = "tanh", own_V: bool = True):
        super().__init__()
        check.sizes(d_model=d_model, d_ff=d_ff)
        check.choice(SecondGate, gate=gate)
        self.d_model, self.gate = d_model, gate
        self.W = nn.Linear(d_model, d_ff, bias=False)
        self.V = nn.Linear(d_model, d_ff, bias=False) if own_V else None
        self.W_2 = nn.Linear(d_ff, d_model, bias=False)

    def forward(
        self, x: Float[Tensor, "... d"], *, x_V: Float[Tensor, "... f"] | None = None
    ) -> Float[Tensor, "... d"]:
        """Compute y from x; from x V as well, if it is given."""
        check.width(x, self.d_model)
        check.fits_weights(x, self.W)
        x_V = self.V(x) if x_V is None else x_V
        second = torch.tanh if self.gate == "tanh" else torch.sigmoid
        return self.W_2(F.silu(self.W(x)) * second(x_V))
