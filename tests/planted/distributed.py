"""Mistakes in SSD over several ranks that the properties of test_distributed.py must catch."""

from planting import mistakes
from test_distributed import (
    IDS,
    adds_up_once,
    can_be_recomputed,
    has_second_derivatives,
    is_computed_as_asked,
    is_one_pass,
    keeps_its_digits,
    leaves_the_model_as_it_was,
    needs_neither_state_nor_skip,
    reads_as_the_whole,
    says_little,
    says_what_is_wrong_on_every_rank,
    takes_part_with_a_final_state_alone,
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
        "no decay inside the slice": [("log_decay.exp(), C", "torch.ones_like(log_decay), C")],
        "the decay up to the token before": [
            ("(dt.to(own.dtype) * A).cumsum(1)", "(dt.to(own.dtype) * A).cumsum(1) - dt * A")],
        "heads in the order of tiles": [
            ("expand_groups(C, x.shape[2]).to(",
             "torch.cat([C] * (x.shape[2] // C.shape[2]), 2).to(")],
        "gradients of this rank alone": [("_Shared.apply(t, group) for t", "t for t")],
        "the gradients are not summed": [
            ("dist.all_reduce(total, group=group)", "dist.all_reduce(total.clone(), group=group)")],
        "no gradient through what was sent": [
            ("dist.reduce_scatter_single(mine, ", "mine.zero_(); dist.reduce_scatter_single("
             "mine.clone(), ")],
        "the initial state once per rank": [
            ("states = [torch.zeros_like(own) if state is None else state]",
             "states = [torch.zeros_like(own) if state is None else state * ranks]")]}),
    (takes_part_without_a_final_state, CUT, {
        "a rank that uses no pair": [
            ("_Joined.apply(y.to(x.dtype)[:, :length], final_state)",
             "y.to(x.dtype)[:, :length], final_state")]}),
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
        "running sums in sixteen bits": [
            ("(dt.to(own.dtype) * A).cumsum(1)",
             "(dt.bfloat16() * A.bfloat16()).cumsum(1).float()")]}),
    (keeps_its_digits, bfloat16, {
        "an output in float32": [("y.to(x.dtype)[:, :length]", "y[:, :length]")]}),
    (takes_part_with_a_final_state_alone, CUT, {
        "y and state apart": [
            ("_Joined.apply(y.to(x.dtype)[:, :length], final_state)",
             "y.to(x.dtype)[:, :length], final_state")]}),
    (has_second_derivatives, CUT, {
        "what was sent is taken for a constant": [
            ("        return _Scatter.apply(gradient, ctx.group), None",
             "        return _Scatter.apply(gradient.detach(), ctx.group), None")],
        "what came back is not sent on": [
            ("        return _Gather.apply(gradient, ctx.group), None",
             "        return _Gather.apply(gradient, ctx.group) * 0, None")]}),
    (is_computed_as_asked, {
        "always the same form": [
            ("chunk_size, None, backend)", 'chunk_size, None, "chunked")')],
        "always the same chunks": [
            ("_ssd(x, dt, A, B, C, D, chunk_size, None", "_ssd(x, dt, A, B, C, D, 64, None")]}),
    (reads_as_the_whole, "conv", CUT, {
        "no tokens before the slice": [("history=history)", "history=None)")],
        "the first tokens of the ranks before": [
            ("[:, before.shape[1] :]\n", "[:, min(count, before.shape[1]) :][:, :count]\n")],
        "zeros behind": [("(0, 0, count, 0)", "(0, 0, 0, count)")]}),
    (reads_as_the_whole, "rope", CUT, {
        "positions begin anew": [("sum(lengths[:rank]) + torch.arange", "torch.arange")],
        "gradients are not summed": [
            ("dist.all_reduce(parameter.grad, group=group)",
             "dist.all_reduce(parameter.grad.clone(), group=group)")],
        "gradients are summed twice": [
            ("    return _cut_ssd(*arguments, group)",
             "    A = _Shared.apply(arguments[2], group)\n"
             "    return _cut_ssd(*arguments[:2], A, *arguments[3:], group)")]}),
    (reads_as_the_whole, "attention", CUT, {
        "keys of the ranks behind": [("until = _place(group)[0] + 1", "until = _place(group)[1]")],
        "keys of the ranks before alone": [
            ("until = _place(group)[0] + 1", "until = max(1, _place(group)[0])")],
        "strides of what came": [
            ("t.new_empty(t.shape[1:])", "t.new_empty(t.shape[1:]).mT.contiguous().mT")]}),
    (reads_as_the_whole, "attention", EMPTY, {
        "as many tokens everywhere": [
            ("torch.cat([piece[:, :n] for piece, n", "torch.cat([piece for piece, n")]}),
    (leaves_the_model_as_it_was, "rope", {
        "the model itself exchanges": [("copy.deepcopy(model, shared)", "model")],
        "parameters of its own": [("copy.deepcopy(model, shared)", "copy.deepcopy(model)")]}),
    (can_be_recomputed, "conv", False, {
        "nothing but what was read first": [
            ("    history = F.pad(", "    if torch._C._current_graph_task_id() >= 0:\n"
                                     "        before = before * 0\n"
                                     "    history = F.pad(")]}),
    (says_what_is_wrong_on_every_rank, [IDS, IDS + 256], ["wrong on rank 1", "must be in"], {
        "refused alone": [("        if error:\n            raise error\n", ""),
                          ("            error = wrong\n", "            raise wrong\n")]}),
    (adds_up_once, {
        "zeros for what nobody has": [("        if somewhere:\n", "        if True:\n")],
        "frozen parameters too": [
            ("p.grad is not None for p in parameters",
             "p.grad is not None or not p.requires_grad for p in parameters")]}),
])
