"""Mistakes in feed_forward that the tables must catch."""

from planting import mistakes
from test_layers import is_defined

from cheems_ref import feed_forward

ROOMS = (feed_forward,)

# fmt: off
MISTAKES = mistakes([
    (is_defined, "MLP, gated", {
        "activation on the other map": [
            ("F.silu(self.gate_proj(x)) * self.in_proj(x)",
             "self.gate_proj(x) * F.silu(self.in_proj(x))")]}),
    (is_defined, "DGLU", {
        "gates exchanged": [('self.gate == "tanh"', 'self.gate != "tanh"')]}),
])
