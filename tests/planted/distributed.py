"""Mistakes in SSD over several ranks that the properties of test_distributed.py must catch."""

from planting import mistakes
from test_distributed import (
    IDS,
    has_second_derivatives,
    is_one_pass,
    leaves_the_model_as_it_was,
    reads_as_the_whole,
    says_little,
    says_what_is_wrong_on_every_rank,
    takes_part_with_a_final_state_alone,
    takes_part_without_a_final_state,
)

from cheems_ref import distributed

ROOMS = (distributed,)
CUT = (5, 3, 4)
EMPTY = (1, 0, 9, 3)
NEXT = "states.append(decay[..., None, None] * states[-1] + write)"
APART = [
    (
        "_Joined.apply(y.to(x.dtype)[:, :length], final_state)",
        "y.to(x.dtype)[:, :length], final_state",
    )
]

# fmt: off
MISTAKES = mistakes([
    (is_one_pass, CUT, {
        "an inclusive prefix": [("states[rank], states[ranks]", "states[rank + 1], states[ranks]")],
        "no decay between ranks": [(NEXT, "states.append(states[-1] + write)")],
        "the decay of the wrong rank": [("pair[..., -1].exp()", "pairs[-1][..., -1].exp()")],
        "gradients of this rank alone": [
            ("_Collective.apply(t, _share, group) for t", "t for t")]}),
    (takes_part_without_a_final_state, CUT, {
        "a rank that uses no pair": APART}),
    (takes_part_with_a_final_state_alone, CUT, {
        "y and state apart": APART}),
    (is_one_pass, EMPTY, {
        "an empty slice lets time pass": [
            ("(ssd._pad(t, 1) for t in (x, dt, B, C))",
             "(ssd._pad(t, 1) for t in (x, dt, B, C)); dt = dt + 1")]}),
    (says_little, 40, {
        "all tokens are sent": [
            ("    pairs = _Collective.apply(pair, _gather, group)\n",
             "    pairs = _Collective.apply(pair, _gather, group)\n    _gather(x, group)\n")]}),
    (has_second_derivatives, CUT, {
        "what was sent is taken for a constant": [
            ("apply(gradient, BACKWARD", "apply(gradient.detach(), BACKWARD")]}),
    (reads_as_the_whole, "conv", CUT, {
        "no tokens before the slice": [("history=history)\n\n", "history=None)\n\n")]}),
    (reads_as_the_whole, "rope", CUT, {
        "positions begin anew": [("sum(lengths[:rank]) + torch.arange", "torch.arange")],
        "gradients are not summed": [
            ("dist.all_reduce(parameter.grad, group=group)",
             "dist.all_reduce(parameter.grad.clone(), group=group)")],
        "gradients are summed twice": [
            ("        return _cut_ssd(x, dt, A,",
             "        A = _Collective.apply(A, _share, self.group)\n"
             "        return _cut_ssd(x, dt, A,")]}),
    (reads_as_the_whole, "attention", CUT, {
        "keys of the own slice alone": [
            ("cache._replace(k=k, v=v, position_ids=positions)", "cache")]}),
    (leaves_the_model_as_it_was, "rope", {
        "the model itself exchanges": [("copy.deepcopy(model, shared)", "model")]}),
    (says_what_is_wrong_on_every_rank, [IDS, IDS + 256], ["wrong on rank 1", "must be in"], {
        "refused alone": [("            error = wrong\n", "            raise wrong\n")]}),
])
