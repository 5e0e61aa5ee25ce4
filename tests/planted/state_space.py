"""Mistakes that the properties of test_state_space.py must catch."""

import test_state_space as tests
from planting import mistakes

from cheems_ref import state_space

ROOMS = (state_space,)


# fmt: off
MISTAKES = mistakes([
    (tests.zoh_integrates_the_equation, {
        "B̄ of ZOH by Euler": [
            ("return step[:n, :n], step[:n, n]", "return step[:n, :n], dt * B")]}),
    (tests.recurrence_is_not_as_printed, {
        "as printed: reads before it writes": [
            ("y = states[:, 1:] @ C", "y = states[:, :-1] @ C")]}),
    (tests.convolution_is_the_sum, {
        "FFT wraps round": [('size = 2 * n["l"]', 'size = n["l"]')]}),
    (tests.s4d_kernel_is_that_of_the_full_model, {
        "conjugates forgotten": [
            ('return 2 * einsum("dn,dnl->dl"', 'return einsum("dn,dnl->dl"')]}),
    (tests.s4d_is_accurate_in_float32, {
        "exp(z) - 1 of small z": [("torch.expm1(exponent)", "(exponent.exp() - 1)")]}),
    (tests.s4d_starts_where_it_should, "legs", {
        "rank-one part left in": [("A + torch.outer(B, B) / 2", "A + torch.outer(B, B)")]}),
])
# fmt: on
HELD = {mistake.asked() for mistake in MISTAKES}  # test_state_space.py asks all of them
