"""Mistakes that the properties of test_generate.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_generate import (
    HELD as HELD,
)
from test_generate import (
    a_bad_call_is_refused_at_once,
    a_row_that_ends_goes_on_ending,
    a_seed_decides,
    draws_follow_every_choice,
    extremes_are_drawn,
    greedy_is_one_pass,
    no_graph_is_kept,
    prompts_of_different_lengths_do_not_meet,
    sixteen_bits_are_summed_in_float32,
    temperature_0_takes_the_first_of_the_largest,
    text_comes_as_it_is_written,
    text_is_sampled_as_asked,
    the_table_may_be_filled,
    top_k_of_1_is_greedy,
    top_p_keeps_the_token_that_crosses,
)

from cheems_ref import model

LAST = "last = (torch.arange(prompt.shape[1], device=prompt.device) * padding_mask).argmax(dim=1)"
BEFORE = "before = ordered.cumsum(-1) - ordered"
INFERENCE = "with torch.inference_mode():"
DRAW = "torch.multinomial(ordered, 1, generator=sampling.generator)"
CROSSES = "before >= sampling.top_p"
HEAT, GREEDY = "/ max(sampling.temperature, torch.finfo(wide).tiny)", "return logits.argmax(dim=-1)"
PASS = "model._hidden_states(tokens, padding_mask, cache)"
HANDED = "model, prompt, max_new_tokens, sampling, padding_mask=padding_mask, eos_id=eos_id"
CHOSEN = "sample(model.logits(x[rows, last]), sampling)"
TO_NEXT = "tokens, padding_mask, last = ids[:, None],"
PROMPT = "    tokens, cache = prompt, None\n"


def without(name, off):
    return f"Sampling(**vars(sampling) | {{{name!r}: {off}}})"


# fmt: off
PLANTED = [
    (draws_follow_every_choice, {
        "multiplied by the temperature": [(HEAT, HEAT.replace("/ max", "* max"))],
        "temperature left out": [(HEAT, "")],
        "top_k left out": [
            ("if sampling.top_k is not None:", "if False:")],
        "one more than k": [(">= sampling.top_k, 0)", "> sampling.top_k, 0)")],
        "one less than k": [(">= sampling.top_k, 0)", ">= sampling.top_k - 1, 0)")],
        "p of all, not of k": [("        ordered = ordered / ordered.sum(-1, keepdim=True)\n", "")],
        "top_p left out": [("if sampling.top_p is not None and sampling.top_p < 1:", "if False:")],
        "the crossing token left out": [
            (BEFORE, "before = ordered.cumsum(-1)"),
            (CROSSES, f"({CROSSES}) & (before > ordered)")],
        "one token further": [(CROSSES, CROSSES.replace("before", "before - ordered"))],
        "of p the least probable": [(BEFORE, "before = 1 - ordered.cumsum(-1)")],
        "the largest only": [(DRAW, "ordered.argmax(-1, keepdim=True)")],
        "places for ids": [("return ids.gather(1, place)[:, 0]", "return place[:, 0]")],
        "any of the kept": [(DRAW, DRAW.replace("ordered", "(ordered > 0).double()"))],
        "smallest first": [("descending=True", "descending=False")]}),
    (top_p_keeps_the_token_that_crosses, {
        "one more at p itself": [(CROSSES, CROSSES.replace(">=", ">"))],
        "the crossing token left out": [
            (BEFORE, "before = (ordered.cumsum(-1)).clamp(max=0.9999)")]}),
    (temperature_0_takes_the_first_of_the_largest, {
        "the last of equals": [
            (GREEDY, "return logits.shape[1] - 1 - logits.flip(1).argmax(dim=1)")]}),
    (top_k_of_1_is_greedy, {
        "two for one": [(">= sampling.top_k, 0)", "> sampling.top_k, 0)")],
        "never colder than 1": [(HEAT, "/ max(sampling.temperature, 1)")]}),
    (extremes_are_drawn, {
        "the largest not taken off": [
            ("(ordered - ordered[:, :1])", "ordered")],
        "the smallest taken off": [("ordered[:, :1]", "ordered[:, -1:]")]}),
    (sixteen_bits_are_summed_in_float32, {
        "sums in sixteen bits": [
            ("torch.promote_types(logits.dtype, torch.float32)", "logits.dtype")]}),
    (a_seed_decides, {
        "torch's own generator": [(DRAW, "torch.multinomial(ordered, 1)")],
        "always the same": [
            (DRAW, DRAW.replace("=sampling.generator", "=torch.Generator().manual_seed(0)"))]}),
    (greedy_is_one_pass, "SEIE", {
        "every id alone": [(PASS, PASS.replace(" cache", " None"))],
        "the first cache again": [
            ("x, cache = " + PASS, f"x, new = {PASS}\n            cache = cache or new")],
        "the first token of the prompt": [("prompt.shape[1] - 1, device", "0, device")],
        "the second largest": [(GREEDY, "return logits.topk(2).indices[:, 1]")],
        "the prompt again": [(TO_NEXT, TO_NEXT.replace("ids[:, None]", "tokens[:, -1:]"))]}),
    (prompts_of_different_lengths_do_not_meet, "SHSRAH", {
        "the last column": [(LAST, "last = torch.full(prompt.shape[:1], prompt.shape[1] - 1)")],
        "the number of tokens": [(LAST, "last = padding_mask.sum(1) - 1")],
        "the first token": [(LAST, "last = padding_mask.byte().argmax(dim=1)")],
        "last of the first row": [(LAST, LAST + "[:1].expand(len(prompt))")],
        "padding forgotten": [(PASS, PASS.replace("padding_mask", "None"))]}),
    (a_row_that_ends_goes_on_ending, {
        "rows that ended write on": [("ids = ids.masked_fill(done, eos_id)", "pass")],
        "the first end ends all": [("bool(done.all())", "bool(done.any())")],
        "never ends": [("bool(done.all())", "False")],
        "the end is not written": [
            ("yield ids.clone()", "if done.all():\n            return\n        yield ids.clone()")],
        "one row ends all rows": [("done | (ids == eos_id)", "done | (ids == eos_id).any()")]}),
    (text_is_sampled_as_asked, {
        f"{name} not handed on": [(HANDED, HANDED.replace("sampling,", without(name, off) + ","))]
        for name, off in dict(temperature=1.0, top_k=None, top_p=None, generator=None).items()}),
    (text_is_sampled_as_asked, {
        "stream has its own heat": [
            (CHOSEN, CHOSEN.replace("sampling)", without("temperature", 1.0) + ")"))],
        "rows for steps": [("torch.stack(new, dim=1)", "torch.stack(new[::-1], dim=1)")]}),
    (text_comes_as_it_is_written, {
        "one pass too many": [
            ("        yield ids.clone()",
             "        model.hidden_states(ids[:, None].clone())\n        yield ids.clone()")],
        "all at once": [
            ("        yield ids.clone()", "        out.append(ids.clone())"),
            (PROMPT, PROMPT + "    out = []\n"),
            ("torch.zeros_like(last)\n", "torch.zeros_like(last)\n    yield from out\n")],
        "the prompt every time": [
            (TO_NEXT + " None, torch.zeros_like(last)",
             "tokens, cache = torch.cat([tokens, ids[:, None]], 1), None\n"
             "        last = last + 1")],
        "one more than asked": [
            ("for _ in range(max_new_tokens):", "for _ in range(max_new_tokens + 1):")]}),
    (a_bad_call_is_refused_at_once, {
        "when it is asked for an id": [
            ("    return _stream(model,", "    yield from _stream(model,")],
        "only what is read first is counted": [(", max_new_tokens=max_new_tokens)\n", ")\n")]}),
    (no_graph_is_kept, {
        "ids of inference": [("yield ids.clone()", "yield ids")],
        "the graph is kept": [(INFERENCE, "with torch.enable_grad():")],
        "inference while waiting": [("        yield ids.clone()", "            yield ids.clone()")],
        "the model is frozen": [(PROMPT, PROMPT + "    model.requires_grad_(False)\n")]}),
]
PLANTED_MODEL = [
    (the_table_may_be_filled, {
        "the last id needs a place": [
            ("n_tokens + max_new_tokens - 1", "n_tokens + max_new_tokens")],
        "padding needs places": [
            ("length if padding_mask is None else padding_mask.sum(1)", "length")],
        "prompts that are not read": [(" or max_new_tokens < 1:", ":")]}),
    (a_bad_call_is_refused_at_once, {
        "one more": [(") > n:", ") > n + 1:")],
        "the shortest row": [("int(n_tokens.max())", "int(n_tokens.min())")]}),
]
# fmt: on

MISTAKES = mistakes([*PLANTED, *PLANTED_MODEL], model)
