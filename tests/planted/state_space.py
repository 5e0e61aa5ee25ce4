"""Mistakes that the properties of test_state_space.py must catch."""

from planting import mistakes
from test_state_space import (
    convolution_is_the_sum,
    recurrence_is_not_as_printed,
    s4d_is_accurate_in_float32,
    s4d_kernel_is_that_of_the_full_model,
    s4d_starts_where_it_should,
    s4d_steps_add_up,
    zoh_integrates_the_equation,
)

from cheems_ref import state_space

ROOMS = (state_space,)


# fmt: off
MISTAKES = mistakes([
    (zoh_integrates_the_equation, {
        "B̄ of ZOH by Euler": [
            ("return step[:n, :n], step[:n, n]", "return step[:n, :n], dt * B")]}),
    (recurrence_is_not_as_printed, {
        "as printed: reads before it writes": [
            ("y = states[:, 1:] @ C", "y = states[:, :-1] @ C")]}),
    (convolution_is_the_sum, {
        "FFT wraps round": [('size = 2 * n["l"]', 'size = n["l"]')]}),
    (s4d_kernel_is_that_of_the_full_model, {
        "conjugates forgotten": [
            ('return 2 * einsum("dn,dnl->dl"', 'return einsum("dn,dnl->dl"')]}),
    (s4d_steps_add_up, {
        "B̄ of S4D by Euler": [("torch.expm1(exponent) / A", "exponent / A")]}),
    (s4d_is_accurate_in_float32, {
        "exp(z) - 1 of small z": [("torch.expm1(exponent)", "(exponent.exp() - 1)")]}),
    (s4d_starts_where_it_should, "legs", {
        "rank-one part left in": [("A + torch.outer(B, B) / 2", "A + torch.outer(B, B)")]}),
])
# fmt: on
HELD = {mistake.asked() for mistake in MISTAKES}  # test_state_space.py asks all of them
