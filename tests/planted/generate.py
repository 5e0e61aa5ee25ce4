"""Mistakes that the properties of test_generate.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_generate import HELD as HELD
from test_generate import (
    a_bad_call_is_refused_at_once,
    draws_follow_every_choice,
    prompts_of_different_lengths_do_not_meet,
    text_comes_as_it_is_written,
    the_smallest_top_p_keeps_the_best,
)

from cheems_ref import model

LAST = "last = (torch.arange(prompt.shape[1], device=prompt.device) * padding_mask).argmax(dim=1)"
BEFORE = "before = ordered.cumsum(-1) - ordered"
CROSSES = "before >= p"
PASS = "tokens, padding_mask=padding_mask, cache=cache, validate=False"

# fmt: off
MISTAKES = mistakes([
    (draws_follow_every_choice, {
        "p of all, not of k": [("        ordered = ordered / ordered.sum(-1, keepdim=True)\n", "")],
        "the crossing token left out": [
            (BEFORE, "before = ordered.cumsum(-1)"),
            (CROSSES, f"({CROSSES}) & (before > ordered)")],
        "places for ids": [("return ids.gather(1, place)[:, 0]", "return place[:, 0]")]}),
    (the_smallest_top_p_keeps_the_best, {
        "0 in float32": [(CROSSES, "before >= sampling.top_p")]}),
    (prompts_of_different_lengths_do_not_meet, "SHSRAH", {
        "the last column": [(LAST, "last = torch.full(prompt.shape[:1], prompt.shape[1] - 1)")],
        "the number of tokens": [(LAST, "last = padding_mask.sum(1) - 1")],
        "padding forgotten": [(PASS, PASS.replace("=padding_mask", "=None"))]}),
    (text_comes_as_it_is_written, {
        "the prompt every time": [
            ("tokens, padding_mask, last, read = ids[:, None], None, torch.zeros_like(last), later",
             "tokens, cache = torch.cat([tokens, ids[:, None]], 1), None\n"
             "        last = last + 1")]}),
    (a_bad_call_is_refused_at_once, {
        "when it is asked for an id": [
            ("    return _stream(model,", "    yield from _stream(model,")]}),
], model)
