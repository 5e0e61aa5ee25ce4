"""Mistakes that the properties of test_linear_attention.py must catch."""

from functools import partial

import test_linear_attention as tests
from planting import mistakes

import cheems_ref.linear_attention as linear_attention

ROOMS = (linear_attention,)

DECAY = """\
    steps = repeat(g, "b c h t -> b c h t s", s=size).tril(-1)
    decay = steps.cumsum(dim=-2).exp().tril()
"""
RUNNING_SUMS = """\
    total = g.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
"""
UNDECAYED = ("k, k) * decay).tril", "k, k)).tril")
MASK_AFTER_EXP = RUNNING_SUMS.replace(").tril().exp()", ").exp()")

# fmt: off
MISTAKES = mistakes([
    (tests.agree, "linear_attention", {
        "reads before it writes": [
            ("        state = update(state, *token)\n", ""),
            ("_read(state, q_t))\n",
             "_read(state, q_t))\n        state = update(state, *token)\n")]}),
    (tests.agree, "gated_linear_attention", {
        "the write decays too": [
            ("return _add(_decay(S, g), k, v)", "return _decay(_add(S, k, v), g)")]}),
    (tests.is_the_least_change_for_the_pair, "longhorn", {
        "β for ε": [("beta / (1 + beta * k.square().sum(-1))", "beta")]}),
    (tests.agree, "gated_delta_rule", {
        "the error of the state before it decays": [
            ("return _correct(_decay(S, g), k, v, beta)",
             "return _decay(S, g) + _correct(S, k, v, beta) - S")]}),
    (tests.keeps_its_digits, "gated_linear_attention in chunks", {
        "differences of running sums": [(DECAY, RUNNING_SUMS)]}),
    (partial(tests.agree, g=(1e4, 1e4)), "gated_linear_attention in chunks", {
        "masked after exp": [(DECAY, MASK_AFTER_EXP)]}),
    (tests.agree, "gated_delta_rule in chunks", {
        "no decay in the system": [UNDECAYED]}),
])
