"""Mistakes that the properties of test_generate.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_generate import HELD as HELD
from test_generate import (
    a_bad_call_is_refused_at_once,
    a_row_that_ends_goes_on_ending,
    draws_follow_every_choice,
    greedy_is_one_pass,
    prompts_of_different_lengths_do_not_meet,
    sixteen_bits_are_summed_in_float32,
    text_comes_as_it_is_written,
    the_table_may_be_filled,
)

from cheems_ref import model

LAST = "last = (torch.arange(prompt.shape[1], device=prompt.device) * padding_mask).argmax(dim=1)"
BEFORE = "before = ordered.cumsum(-1) - ordered"
CROSSES = "before >= sampling.top_p"
HEAT = "/ max(sampling.temperature, torch.finfo(wide).tiny)"
PASS = "tokens, padding_mask=padding_mask, cache=cache, validate=False"

# fmt: off
MISTAKES = mistakes([
    (draws_follow_every_choice, {
        "multiplied by the temperature": [(HEAT, HEAT.replace("/ max", "* max"))],
        "p of all, not of k": [("        ordered = ordered / ordered.sum(-1, keepdim=True)\n", "")],
        "the crossing token left out": [
            (BEFORE, "before = ordered.cumsum(-1)"),
            (CROSSES, f"({CROSSES}) & (before > ordered)")],
        "places for ids": [("return ids.gather(1, place)[:, 0]", "return place[:, 0]")]}),
    (sixteen_bits_are_summed_in_float32, {
        "sums in sixteen bits": [
            ("torch.promote_types(logits.dtype, torch.float32)", "logits.dtype")]}),
    (greedy_is_one_pass, "SEIE", {
        "every id alone": [(PASS, PASS.replace("=cache", "=None"))]}),
    (prompts_of_different_lengths_do_not_meet, "SHSRAH", {
        "the last column": [(LAST, "last = torch.full(prompt.shape[:1], prompt.shape[1] - 1)")],
        "the number of tokens": [(LAST, "last = padding_mask.sum(1) - 1")],
        "padding forgotten": [(PASS, PASS.replace("=padding_mask", "=None"))]}),
    (a_row_that_ends_goes_on_ending, {
        "rows that ended write on": [("ids = ids.masked_fill(done, eos_id)", "pass")],
        "the first end ends all": [("bool(done.all())", "bool(done.any())")]}),
    (text_comes_as_it_is_written, {
        "the prompt every time": [
            ("tokens, padding_mask, last = ids[:, None], None, torch.zeros_like(last)",
             "tokens, cache = torch.cat([tokens, ids[:, None]], 1), None\n"
             "        last = last + 1")]}),
    (a_bad_call_is_refused_at_once, {
        "when it is asked for an id": [
            ("    return _stream(model,", "    yield from _stream(model,")]}),
    (the_table_may_be_filled, {
        "the last id needs a place": [
            ("n_tokens + max_new_tokens - 1", "n_tokens + max_new_tokens")]}),
], model)
