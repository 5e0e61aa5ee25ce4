"""Mistakes in SSD over several ranks that the properties of test_distributed.py must catch."""

from planting import mistakes
from test_distributed import (
    is_one_pass,
    keeps_its_digits,
    leaves_the_model_as_it_was,
    needs_neither_state_nor_skip,
    reads_as_the_whole,
    says_little,
    takes_part_without_a_final_state,
)
from torch import bfloat16, float32

from cheems_ref import distributed

ROOMS = (distributed,)
CUT = (5, 3, 4)
EMPTY = (1, 0, 9, 3)
NEXT = "states.append(decay[..., None, None] * states[-1] + write)"

# fmt: off
MISTAKES = mistakes([
    (is_one_pass, CUT, {
        "an inclusive prefix": [("states[rank], states[ranks]", "states[rank + 1], states[ranks]")],
        "the prefix of the rank before": [
            ("states[rank], states[ranks]", "states[max(0, rank - 1)], states[ranks]")],
        "the final state of this rank": [
            ("states[rank], states[ranks]", "states[rank], states[rank + 1]")],
        "no decay between ranks": [(NEXT, "states.append(states[-1] + write)")],
        "a slice decays what it writes": [
            (NEXT, "states.append(decay[..., None, None] * (states[-1] + write))")],
        "the decay of the last rank": [
            ("pair[..., -1].exp()", "pairs[-1][..., -1].exp()")],
        "no decay inside the slice": [("log_decay.exp().to(", "torch.ones_like(log_decay).to(")],
        "the decay up to the token before": [
            ("(dt.to(exact) * A).cumsum(1)", "(dt.to(exact) * A).cumsum(1) - dt * A")],
        "heads in the order of tiles": [
            ("expand_groups(C, x.shape[2]).to(",
             "torch.cat([C] * (x.shape[2] // C.shape[2]), 2).to(")],
        "gradients of this rank alone": [("_Shared.apply(t, group) for t", "t for t")],
        "gradients of the last rank": [
            ("        dist.all_reduce(gradient, group=ctx.group)\n        return",
             "        dist.all_reduce(gradient * 0, group=ctx.group)\n        return")],
        "no gradient through what was sent": [
            ("dist.reduce_scatter_single(mine, ", "mine.zero_(); dist.reduce_scatter_single("
             "mine.clone(), ")],
        "the initial state once per rank": [
            ("states = [torch.zeros_like(own) if state is None else state]",
             "states = [torch.zeros_like(own) if state is None else state * ranks]")]}),
    (takes_part_without_a_final_state, CUT, {
        "a rank that used no pair": [
            ("    states = torch.stack(states)\n", "")]}),
    (is_one_pass, EMPTY, {
        "an empty slice lets time pass": [
            ("(_pad(t, 1) for t in (x, dt, B, C))",
             "(_pad(t, 1) for t in (x, dt, B, C)); dt = dt + 1")]}),
    (needs_neither_state_nor_skip, CUT, {
        "a state to begin with": [
            ("torch.zeros_like(own) if state is None", "own if state is None")]}),
    (says_little, 40, {
        "all tokens are sent": [
            ("    pairs = _Gather.apply(pair, group)\n",
             "    pairs = _Gather.apply(pair, group)\n    _Gather.apply(x, group)\n")]}),
    (keeps_its_digits, float32, {
        "running sums in the dtype of x": [("dt.to(exact) * A", "dt.bfloat16() * A.bfloat16()")]}),
    (keeps_its_digits, bfloat16, {
        "an output in float32": [("y.to(x.dtype)[:, :length]", "y[:, :length]")]}),
    (reads_as_the_whole, "conv", CUT, {
        "no tokens before the slice": [("history=before)", "history=None)")],
        "the first tokens of the ranks before": [("[:, -count:]", "[:, :count]")],
        "zeros behind": [("(0, 0, count, 0)", "(0, 0, 0, count)")]}),
    (reads_as_the_whole, "rope", CUT, {
        "positions begin anew": [("sum(lengths[:rank]) + torch.arange", "torch.arange")],
        "gradients are not summed": [
            ("            dist.all_reduce(parameter.grad, group=group)\n",
             "            dist.all_reduce(parameter.grad.clone(), group=group)\n")],
        "gradients are summed twice": [
            ("return _cut_ssd(*arguments, group)",
             "A = _Shared.apply(arguments[2], group)\n"
             "        return _cut_ssd(*arguments[:2], A, *arguments[3:], group)")]}),
    (reads_as_the_whole, "attention", CUT, {
        "keys of the ranks behind": [("lengths, group)[:, :end]", "lengths, group)")],
        "keys of this rank alone": [("layer._read = reads(layer)", "layer._read = layer._read")]}),
    (reads_as_the_whole, "attention", EMPTY, {
        "as many tokens everywhere": [
            ("torch.cat([piece[:, :n] for piece, n", "torch.cat([piece for piece, n")]}),
    (leaves_the_model_as_it_was, "rope", {
        "it goes on exchanging": [
            ("layer._scan, layer._convolve = _ssd, short_convolution", "pass")]}),
    (leaves_the_model_as_it_was, "attention", {
        "it goes on reading everywhere": [("del layer._read", "pass")]}),
])
