"""Mistakes of the listings, and of thought, that the properties of test_experts.py must catch."""

from planting import mistakes
from test_experts import (
    finds_the_best,
    gathers_no_rows,
    routes_in_float32_under_autocast,
    what_is_idle_gets_no_gradient,
)

from cheems_ref import retrieval

ROOMS = (retrieval,)

# fmt: off
MISTAKES = mistakes([
    (finds_the_best, {
        "one pair too few": [("min(n_best, k // (a + 1))", "min(n_best, (k - 1) // (a + 1))")],
        "index i + j r": [
            ("where[:, 0].index_select(-1, first) * r + where[:, 1]",
             "where[:, 1].index_select(-1, second) * r + where[:, 0]")]}),
    (gathers_no_rows, {
        "rows gathered": [
            ("return _products(x, table, indices.long())",
             'return einsum("nd,njd->nj", x, table[indices])')]}),
    (routes_in_float32_under_autocast, "PEER", {
        "autocast chooses": [("with autocast_off(keys.device):", "if True:")]}),
    (what_is_idle_gets_no_gradient, "PEER", {
        "neurons of one head": [("- router.n_heads * router.k", "- router.k")]}),
])
