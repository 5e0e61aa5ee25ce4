"""Mistakes in SSD over several ranks that the properties of test_distributed.py must catch."""

from planting import mistakes
from test_distributed import is_one_pass, reads_as_the_whole, says_little

from cheems_ref import distributed

ROOMS = (distributed,)
CUT = (5, 3, 4)

# fmt: off
MISTAKES = mistakes([
    (is_one_pass, CUT, {
        "an inclusive prefix": [("states[rank], states[ranks]", "states[rank + 1], states[ranks]")],
        "no decay between ranks": [
            ("states.append(decay[..., None, None] * states[-1] + write)",
             "states.append(states[-1] + write)")],
        "gradients of this rank alone": [
            ("_Collective.apply(t, _share, group) for t", "t for t")]}),
    (is_one_pass, CUT, False, {
        "a rank that uses no pair": [
            ("_Joined.apply(y.to(x.dtype)[:, :length], final_state)",
             "y.to(x.dtype)[:, :length], final_state")]}),
    (says_little, 40, {
        "all tokens are sent": [
            ("    pairs = _Collective.apply(pair, _gather, group)\n",
             "    pairs = _Collective.apply(pair, _gather, group)\n    _gather(x, group)\n")]}),
    (reads_as_the_whole, "conv", CUT, {
        "no tokens before the slice": [("history=history)\n\n", "history=None)\n\n")]}),
    (reads_as_the_whole, "rope", CUT, {
        "positions begin anew": [("sum(lengths[:rank]), dtype=", "0, dtype=")],
        "gradients are not summed": [
            ("dist.all_reduce(parameter.grad, group=group)",
             "dist.all_reduce(parameter.grad.clone(), group=group)")]}),
    (reads_as_the_whole, "attention", CUT, {
        "keys of the own slice alone": [
            ("cache._replace(k=k, v=v, position_ids=positions)", "cache")]}),
])
