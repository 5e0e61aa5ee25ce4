"""Mistakes that the properties of test_convolution.py must catch."""

from planting import mistakes
from test_convolution import (
    history_keeps_nothing_else,
    is_causal,
    is_the_loop,
    rounds_once,
)

from cheems_ref import convolution

ROOMS = (convolution,)


# fmt: off
MISTAKES = mistakes([
    (is_the_loop, {
        "history ends with the padding": [
            ("newest = padding_mask.sum(", "newest = (padding_mask | True).sum(")],
        "tokens come back in another order": [
            ("order.argsort(dim=1)[..., None]", "order[..., None]")],
        "gradients look at what padding holds": [
            ("u = u.masked_fill(~padding_mask[..., None], 0)", "u = u + 0")],
        "taps reversed": [("weight.unbind(1)", "weight.flip(1).unbind(1)")],
        "does not see its token": [
            ('u[:, i : i + n["l"]] for i', 'F.pad(u, (0, 0, 1, 0))[:, i : i + n["l"]] for i')],
        "silu missing": [("F.silu(sum(taps))", "sum(taps)")],
        "history one token old": [
            ('history = u[:, n["l"] :]', 'history = u[:, n["l"] - 1 : -1]')]}),
    (is_causal, {
        "sees the next token": [
            ('u[:, i : i + n["l"]] for i',
             'F.pad(u, (0, 0, 0, 1))[:, i + 1 : i + 1 + n["l"]] for i')]}),
    (history_keeps_nothing_else, {
        "history is a view": [('history = u[:, n["l"] :].clone()', 'history = u[:, n["l"] :]')]}),
    (rounds_once, {
        "sums in sixteen bits": [
            ("wide = torch.promote_types(u.dtype, torch.float32)", "wide = u.dtype")]}),
])
