"""Mistakes that the properties of test_model.py must catch."""

import models
import test_model as tests
from planting import mistakes

from cheems_ref import model, rope

ROOMS, HELD = models.ROOMS, tests.HELD
SEQUENCE = "self.norm(x), position_ids, padding_mask=padding_mask, cache=cache, rotary=rotary"
POSITIONS = "(before[:, None] + real.cumsum(1) - 1).clamp(min=0)"
BEFORE, AFTER = "cache.layers, cache.n_tokens", "before + real.sum(1)"
EMBEDDING_STARTS = "nn.init.normal_(self.embedding.weight, std=0.02)"
RESET = "        self.reset_parameters()\n"

# fmt: off
MISTAKES = mistakes([
    (tests.is_the_definition, "SEIE", {
        "residual of the norm": [
            ("return x + y, (cache", "return self.norm(x) + y, (cache")],
        "no norm before S and I": [(SEQUENCE, SEQUENCE.replace("self.norm(x)", "x"))],
        "no last norm": [("return self.norm(x), cache", "return x, cache")]}),
    (tests.padding_and_cuts_change_nothing, "SHSRAH", {
        "padding is read": [(SEQUENCE, SEQUENCE.replace("=padding_mask", "=None"))],
        "positions count padding": [(POSITIONS, "before[:, None] + torch.arange(real.shape[1])")],
        "positions start again": [(BEFORE, "cache.layers, 0 * cache.n_tokens")],
        "n_tokens of this call": [(AFTER, "real.sum(1)")],
        "n_tokens written to": [(AFTER, "before.add_(real.sum(1))")]}),
    (tests.starts_as_one_made_directly, "SHSRAH", {
        "drawn in the constructor alone": [
            (EMBEDDING_STARTS, ""), (RESET, "        " + EMBEDDING_STARTS + "\n")]}),
    (tests.fresh_weights_are_those_published, "cheems-tiny", {
        "the embedding as torch starts it": [(EMBEDDING_STARTS, "")]}),
], model) + mistakes([
    (tests.layers_turn_by_their_own, dict(pattern="AAAM"), {
        "a table for any positions": [("table.position_ids is position_ids", "True")],
        "one base for all layers": [("key = dim, base,", "key = dim,")]}),
], rope)
# fmt: on
