"""Mistakes that the properties of test_mamba.py must catch."""

import test_mamba as tests
from planting import mistakes

from cheems_ref import mamba

ROOMS = (mamba,)


# fmt: off
MISTAKES = mistakes([
    (tests.scan_is_the_definition, "sequential", {
        "decays its new write": [
            ("* A) * state + write", "* A) * (state + write)")],
        "ZOH in writes": [
            ("(dt_t * x_t)[..., None] * B_t[:, None]",
             "(torch.expm1(dt_t[..., None] * A) / A * x_t[..., None]) * B_t[:, None]")]}),
    (tests.scan_is_the_definition, "parallel", {
        "reads before it writes": [("states[:, 1:], C", "states[:, :-1], C")]}),
    (tests.scan_is_wide_inside, "parallel", {
        "sums in sixteen bits": [
            ("(t.to(wide) for t in (x, dt, A, B, C)), state)",
             "(t.to(x.dtype) for t in (x, dt, A, B, C)), state.to(x.dtype))")]}),
    (tests.takes_few_steps, "parallel", {
        "one token after the other": [
            ("    a_1, b_1 = (t[:,",
             "    h = _scan(a[:, :-1], b[:, :-1])\n"
             "    return torch.cat([h, a[:, -1:] * h[:, -1:] + b[:, -1:]], dim=1)\n"
             "    a_1, b_1 = (t[:,")]}),
    (tests.layer_starts_where_it_should, {
        "dt_bias is dt": [("dt + torch.log(-torch.expm1(-dt))", "dt")]}),
])
