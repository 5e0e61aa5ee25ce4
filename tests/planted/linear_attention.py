"""Mistakes that the properties of test_linear_attention.py must catch."""

from planting import mistakes
from test_linear_attention import (
    agree,
    agree_in_gradient,
    calls_join_up,
    costs_the_same_for_every_chunk,
    does_not_grow,
    has_dtypes_and_accuracy,
    is_causal,
    is_one_gradient_step,
    is_the_least_change_for_the_pair,
    keeps_its_digits,
    leaves_its_inputs_alone,
    recalls_what_it_was_told,
    rows_and_heads_do_not_meet,
    scale_is_a_factor_on_the_output,
    table_is_complete,
    takes_steps_by_the_chunk,
)

import cheems_ref.linear_attention as linear_attention

ROOMS = (linear_attention,)

DECAY = """\
    steps = repeat(g, "b c h t -> b c h t s", s=size).tril(-1)
    decay = steps.cumsum(dim=-2).exp().tril()
"""
RUNNING_SUMS = """\
    total = g.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
"""
UNDECAYED = ("k, k) * decay).tril", "k, k)).tril")
MASK_AFTER_EXP = RUNNING_SUMS.replace(").tril().exp()", ").exp()")

# fmt: off
MISTAKES = mistakes([
    (agree, "gated_linear_attention", {
        "the write decays too": [
            ("return _decay(S, g) + _outer(v, k)", "return _decay(S + _outer(v, k), g)")],
        "g is taken for the decay": [("g.exp()[..., None, None]", "(-g)[..., None, None]")]}),
    (rows_and_heads_do_not_meet, "gated_linear_attention", {
        "rows share their decay": [
            ("g.exp()[..., None, None]", "g.exp().mean(0)[..., None, None]")],
        "heads share their decay": [
            ("g.exp()[..., None, None]", "g.exp().mean(1, keepdim=True)[..., None, None]")]}),
    (agree, "linear_attention", {
        "reads before it writes": [
            ("        state = update(state, *token)\n", ""),
            ("_read(state, q_t))\n",
             "_read(state, q_t))\n        state = update(state, *token)\n")],
        "no initial state": [(" if state is None else state\n", "\n")],
        "the scale of a softmax": [
            ("scale * _read(state, q_t)", "q_t.shape[-1] ** -0.5 * scale * _read(state, q_t)")]}),
    (leaves_its_inputs_alone, "linear_attention", {
        "writes into the state it was given": [
            ("return S + _outer(v, k)", "return S.add_(_outer(v, k))")]}),
    (calls_join_up, "linear_attention", {
        "forgets between calls": [(" if state is None else state\n", "\n")]}),
    (has_dtypes_and_accuracy, "linear_attention", {
        "sums in sixteen bits": [
            ("return t.to(torch.promote_types(t.dtype, torch.float32))", "return t")]}),
    (scale_is_a_factor_on_the_output, "linear_attention", {
        "no scale": [("scale * _read(state, q_t)", "_read(state, q_t)")]}),
    (scale_is_a_factor_on_the_output, "linear_attention_quadratic", {
        "the state is scaled": [
            ('state + einsum("bshp,bshn->bhpn", v, k)',
             'scale * (state + einsum("bshp,bshn->bhpn", v, k))')]}),
    (is_causal, "linear_attention_quadratic", {
        "no mask": [('"bthn,bshn->bhts", q, k).tril()', '"bthn,bshn->bhts", q, k)')]}),
    (agree, "linear_attention_quadratic", {
        "a token does not see itself": [
            ('"bthn,bshn->bhts", q, k).tril()', '"bthn,bshn->bhts", q, k).tril(-1)')]}),
    (is_the_least_change_for_the_pair, "longhorn", {
        "length of the key not squared": [("k.square().sum(-1)", "k.norm(dim=-1)")],
        "the step of the delta rule": [("beta / (1 + beta * k.square().sum(-1))", "beta")],
        "a full step, whatever β": [
            ("beta / (1 + beta * k.square().sum(-1))", "1 / k.square().sum(-1)")]}),
    (does_not_grow, "longhorn", {
        "the step of the delta rule grows": [
            ("beta / (1 + beta * k.square().sum(-1))", "beta")]}),
    (is_the_least_change_for_the_pair, "longhorn in chunks", {
        "β for ε": [("_implicit_step(k, _wide(beta))", "beta")]}),
    (is_one_gradient_step, "delta_rule", {
        "sign of what is recalled": [("error = v - _read(S, k)", "error = v + _read(S, k)")],
        "the value is not weighted": [
            ("_outer(beta[..., None] * error, k)",
             "_outer(v - beta[..., None] * (v - error), k)")]}),
    (recalls_what_it_was_told, "delta_rule", {
        "the state is not corrected": [("error = v - _read(S, k)", "error = v")]}),
    (does_not_grow, "delta_rule", {
        "a step twice as long": [("beta[..., None] * error", "2 * beta[..., None] * error")]}),
    (agree, "gated_delta_rule", {
        "the error of the state before it decays": [
            ("return _correct(_decay(S, g), k, v, beta)",
             "return _decay(S, g) + _correct(S, k, v, beta) - S")],
        "the write decays too": [
            ("return _correct(_decay(S, g), k, v, beta)",
             "return _decay(_correct(S, k, v, beta), g)")]}),
    (is_causal, "gated_linear_attention in chunks", {
        "no mask": [(".exp().tril()", ".exp()")]}),
    (agree, "gated_linear_attention in chunks", {
        "writes decay one step too far": [("s=size).tril(-1)", "s=size).tril()")],
        "reads decay one step short": [
            ("from_start = g.cumsum(dim=-1)", "from_start = (g.cumsum(dim=-1) - g)")],
        "writes decay from the start, not to the end": [
            ("decay[..., -1, :, None]", "decay[..., :, 0, None]")],
        "chunks decay by their first token": [
            ("from_start[:, :, :, -1:]", "from_start[:, :, :, :1]")],
        "a chunk reads what it wrote": [
            ("        incoming.append(state)\n", ""),
            ("w, k_to_end)\n", "w, k_to_end)\n        incoming.append(state)\n")],
        "filled up in front": [("(0, -t.shape[1] % size)", "(-t.shape[1] % size, 0)")]}),
    (keeps_its_digits, "gated_linear_attention in chunks", {
        "differences of running sums": [(DECAY, RUNNING_SUMS)]}),
    (agree_in_gradient, "gated_linear_attention in chunks", "decay by e^-10000", {
        "masked after exp": [(DECAY, MASK_AFTER_EXP)]}),
    (agree, "gated_linear_attention in chunks", "all is forgotten at times", {
        "differences of running sums after a reset": [(DECAY, RUNNING_SUMS)]}),
    (agree_in_gradient, "gated_linear_attention in chunks", {
        "no gradient through the state": [
            ("incoming.append(state)", "incoming.append(state.detach())")]}),
    (costs_the_same_for_every_chunk, "gated_linear_attention in chunks", {
        "one chunk, whatever its size": [
            ("size = min(chunk_size, q.shape[1])", "size = q.shape[1]")],
        "indexing makes the backward pass quadratic": [
            ("[t.unbind(1) for t in (writes,",
             "[[t[:, c] for c in range(k.shape[1])] for t in (writes,")]}),
    (costs_the_same_for_every_chunk, "gated_delta_rule in chunks", {
        "indexing what is recalled makes it quadratic": [
            ("recalls.unbind(1)", "[recalls[:, c] for c in range(k.shape[1])]")]}),
    (costs_the_same_for_every_chunk, "linear_attention in chunks", {
        "indexing blocks makes the backward pass quadratic": [
            ("(t.split(size * CHUNKS_PER_BLOCK, dim=1) for t",
             "([t[:, i : i + size * CHUNKS_PER_BLOCK]"
             " for i in range(0, k.shape[1], size * CHUNKS_PER_BLOCK)] for t")]}),
    (agree, "linear_attention in chunks", "three blocks and a ragged end", {
        "blocks that forget": [("o, state = _block_of_chunks(", "o, _ = _block_of_chunks(")]}),
    (agree_in_gradient, "linear_attention in chunks", "three blocks and a ragged end", {
        "no gradient between blocks": [
            ("**named, state=state,", "**named, state=state.detach(),")]}),
    (costs_the_same_for_every_chunk, "gated_delta_rule", {
        "indexing tokens makes the backward pass quadratic": [
            ("*(t.unbind(1) for t in (q,",
             "*([t[:, i] for i in range(k.shape[1])] for t in (q,")]}),
    (takes_steps_by_the_chunk, "delta_rule in chunks", {
        "token by token, whatever the chunk": [("elif chunk_size is None:", "elif True:")]}),
    (scale_is_a_factor_on_the_output, "linear_attention in chunks", {
        "no scale": [("outputs.append(scale * o)", "outputs.append(o)")]}),
    (agree, "delta_rule in chunks", {
        "sign of the system": [("solve_triangular(A,", "solve_triangular(-A,")],
        "β of the source": [("(beta * einsum(", "(beta.mT * einsum(")]}),
    (is_causal, "delta_rule in chunks", {
        "transposed system": [
            ("solve_triangular(A, terms, upper=False",
             "solve_triangular(A.mT, terms, upper=True")]}),
    (is_one_gradient_step, "delta_rule in chunks", {
        "the value is not weighted": [("torch.cat([beta * v,", "torch.cat([v,")]}),
    (recalls_what_it_was_told, "delta_rule in chunks", {
        "what the state recalls is left in": [
            ("            w = w - einsum(", "            w = w - 0 * einsum(")]}),
    (agree_in_gradient, "delta_rule in chunks", {
        "no gradient through what is recalled": [("recall, state)", "recall, state.detach())")]}),
    (agree, "gated_delta_rule in chunks", {
        "no decay in the system": [UNDECAYED],
        "what is recalled has not decayed": [("beta * from_start * k]", "beta * k]")]}),
    (agree, "gated_delta_rule in chunks", "one of everything", {
        "two right sides exchanged": [("writes, recalls = solved", "recalls, writes = solved")]}),
    (table_is_complete, "RULES", {
        "gates in another order": [('("g", "beta")),', '("beta", "g")),')],
        "a function that is another's": [("Rule(longhorn, ", "Rule(delta_rule, ")]}),
])
