"""Mistakes in feed_forward that the properties of test_experts.py must catch."""

from planting import detached, mistakes
from test_experts import is_its_equation
from test_layer_gradients import learns_as_defined

from cheems_ref import feed_forward

ROOMS = (feed_forward,)

# fmt: off
MISTAKES = mistakes([
    (is_its_equation, "MLP, gated", {
        "activation on the other map": [
            ("F.silu(self.gate_proj(x)) * self.in_proj(x)",
             "self.gate_proj(x) * F.silu(self.in_proj(x))")]}),
    (is_its_equation, "DGLU", {
        "gates exchanged": [('self.gate == "tanh"', 'self.gate != "tanh"')]}),
    (learns_as_defined, "state mixer", "DGLU", detached("second(self.V(x¦))")),
])
