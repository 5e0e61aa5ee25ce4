"""Attention: both forms, the masks, the inner functions, the layers, and planted mistakes.

As in test_ssd.py, the properties are functions of a module `m`. The positive tests hand them
`cheems_ref.attention`, the negative controls a copy of it with one planted mistake.
"""

import itertools
import math
from functools import partial

import definitions
import properties
import pytest
import torch
from planting import planted
from properties import (
    Work,
    forward,
    gradients,
    is_one_graph,
    normal,
    route_twice,
    rows,
)

import cheems_ref.attention as attention
from cheems_ref import check as door
from cheems_ref.verify import check, check_gradients, must_differ

MASKS = {
    "causal": {},
    "gate": dict(mask="gate", max_positions=16),
    "rounded gate": dict(mask="gate", max_positions=16, hard=True),
    "content": dict(mask="content"),
    "three keys": dict(mask="content", top_k=3),
}
INNER = ("ssd", "retrieved", "linear", "QCAttn")
HEADS = {
    "g = 4": dict(n_heads=4),
    "g = 2": dict(n_heads=4, n_kv_heads=2),
    "one head": dict(n_heads=1, n_kv_heads=1),
}
*SEVERAL, ONE = HEADS
COMBOS = list(itertools.product(INNER, MASKS, SEVERAL))
label = ", ".join


FORMS = (attention.attention, attention.naive_attention)


# --- the formula ------------------------------------------------------------------------------


def causal(t, s, real=None):
    """Which keys each query sees, by a loop: (t, s), or (b, 1, t, s) with `real`."""
    rows = [None] if real is None else real.tolist()
    allowed = torch.zeros(len(rows), 1, t, s, dtype=torch.bool)
    for (b, row), query in itertools.product(enumerate(rows), range(t)):
        token = s - t + query
        seen = [key for key in range(token + 1) if row is None or row[key]]
        allowed[b, 0, query, seen or [token]] = True
    return allowed[0, 0] if real is None else allowed


def some_allowed(kind, t, s, h=4):
    """A mask of one of the shapes that fit; every query sees its own token."""
    if kind is None:
        return None
    shape = {"t s": (t, s), "b 1 t s": (2, 1, t, s), "b h t s": (2, h, t, s)}[kind]
    own = torch.ones(t, s).tril(s - t).triu(s - t).bool()
    return (normal(*shape, seed=9) < 0.5) & causal(t, s) | own


def forms_are_the_definition(m, sizes=(5, 5), kind="b 1 t s"):
    """In values and gradients, for every grouping of keys and values, with a bias and without."""
    (t, s), h = sizes, 4
    for groups, biased in itertools.product(((4, 4), (2, 2), (1, 4), (2, 1)), (False, True)):
        tensors = [normal(2, t, h, 6), *(normal(2, s, g, 6, seed=g) for g in groups)]
        tensors += [normal(2, h, s, seed=5)] * biased
        allowed = some_allowed(kind, t, s)
        shown = causal(t, s) if allowed is None else allowed

        def loop(q, k, v, bias=None, seen=shown):
            return definitions.attention(q, k, v, seen, bias)

        def written_out(q, k, v, bias=None, seen=shown):
            return m.naive_attention(q, k, v, allowed=seen, bias=bias)

        def fused(q, k, v, bias=None, seen=allowed):
            return m.attention(q, k, v, allowed=seen, bias=bias)

        name = f"t, s = {sizes}, groups of k and v = {groups}"
        check(f"written out = definition, {name}", written_out(*tensors), loop(*tensors))
        check(f"SDPA = written out, {name}", fused(*tensors), written_out(*tensors))
        if t:
            check_gradients(f"written out = definition, {name}", written_out, loop, tensors)
            check_gradients(f"SDPA = written out, {name}", fused, written_out, tensors)


@pytest.mark.parametrize("kind", [None, "b 1 t s"])
def test_both_forms_are_the_definition_with_fewer_queries_than_keys(kind):
    for sizes in ((2, 5), (1, 5), (0, 3)):
        forms_are_the_definition(attention, sizes, kind)


def rounds_once(m):
    """In float32, which is then rounded; torch's operator is a few roundings off."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, k, v = (normal(2, n, g, 8, seed=g, dtype=dtype) for n, g in ((9, 4), (40, 2), (40, 1)))
        options = dict(allowed=some_allowed("b 1 t s", 9, 40), bias=normal(2, 4, 40, dtype=dtype))
        got, fused = (f(q, k, v, **options) for f in (m.naive_attention, m.attention))
        options["bias"] = options["bias"].double()
        want = m.naive_attention(q.double(), k.double(), v.double(), **options)
        assert got.dtype == fused.dtype == dtype
        half = torch.finfo(dtype).eps / 2
        assert ((got.double() - want).abs() <= half * want.abs() + 2e-6).all(), dtype
        check(f"SDPA in {dtype} = float64", fused, want.to(dtype))


def test_key_behind_a_large_penalty_is_not_read():
    q, k, v = (normal(2, 5, 4, 6, seed=seed) for seed in range(3))
    penalty, without = torch.zeros(2, 4, 5, dtype=q.dtype), causal(5, 5)
    penalty[..., 1], without[:, 1] = -1e4, False
    for form in FORMS:
        got = form(q, k, v, allowed=causal(5, 5), bias=penalty)
        check("penalty = no key", got, form(q, k, v, allowed=without))


def copies_no_groups(m):
    """One token decoded with grouped keys makes nothing of the size of its cache per head."""
    q, k, v = (normal(2, n, g, 8, seed=n + g) for n, g in ((1, 8), (64, 2), (64, 2)))
    for kind, biased in itertools.product((None, "b 1 t s"), (False, True)):
        options = dict(allowed=some_allowed(kind, 1, 64), bias=normal(2, 8, 64) if biased else None)
        with Work() as counter:
            m.attention(q, k, v, **options)
        assert counter.largest < k.nbytes, f"{counter.largest} bytes, the keys are {k.nbytes}"
    torch.manual_seed(0)
    mixer = m.QCAttn(64, n_heads=8, n_kv_heads=2)
    _, cache = mixer(normal(2, 64, 64).float(), torch.arange(64).expand(2, 64))
    with torch.no_grad(), Work() as counter:
        _, cache = mixer(normal(2, 1, 64).float(), torch.full((2, 1), 64), cache=cache)
    assert counter.largest <= cache.k.nbytes, "the layer copies its keys"


def test_no_copy_of_grouped_keys_is_made_for_a_token():
    copies_no_groups(attention)


def bias_is_held(m, dtype=torch.float32, autocast=True):
    """A bias that sixteen bits would round away is held, also where autocast rounds."""
    q, k, v = torch.randn(3, 1, 5, 2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = -torch.tensor([1e5, 2e5, 100_003.0, 100_001.0, 1e5]).expand(1, 2, 5)
    options = dict(allowed=m.causal_mask(5, 5), bias=bias)
    want = m.naive_attention(q.float(), k.float(), v.float(), **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for form in (m.attention, m.naive_attention):
            got = form(q, k, v, **options)
            assert got.dtype == dtype
            check(f"{form.__name__} in {dtype} = in float32", got, want.to(dtype))


def test_a_bias_beyond_sixteen_bits_is_held():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for autocast in (False, True):
            bias_is_held(attention, dtype, autocast)


def penalty_is_that_of_float32(m):
    """Under autocast, of the values that autocast has made."""
    penalty, v = m.ContentMask(16, 4), normal(2, 9, 4, 4, dtype=torch.bfloat16)
    ids = torch.arange(9).expand(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        got = penalty(v, ids)
    check("penalty under autocast = in float32", got, penalty(v.float(), ids))


def rows_are_those_of_float32(m):
    """Under autocast the same rows are chosen from the same queries, with the same weights."""
    torch.manual_seed(1)
    inner, x = m.RetrievedValues(16, n_heads=2, n_values=50, k_values=4), normal(2, 99, 16).float()
    got, want = route_twice(inner.weights, inner.query_proj, x)
    assert got.dtype == torch.float32 and torch.equal(got > 0, want > 0)
    check("weights under autocast = in float32", got, want)


def test_masks_and_retrieval_are_in_float32_under_autocast():
    penalty_is_that_of_float32(attention)
    rows_are_those_of_float32(attention)


# --- the layers -------------------------------------------------------------------------------


def made(m, combo, **changes):
    inner, mask, heads = combo
    options = HEADS[heads] | dict(rope_base=50.0, **MASKS[mask]) | changes
    if inner == "QCAttn":
        return m.QCAttn(16, **options)
    d_state = 2 if heads == ONE else 4  # 2 is the least that can be turned
    return m.InnerFuncAttn(16, inner=inner, n_values=5, d_state=d_state, **options)


def layer(m, combo, dtype=torch.float64, **changes):
    """Masks moved away from their start; of several heads, head 0 has no gate below 1/2."""
    torch.manual_seed(0)
    mixer = made(m, combo, **changes)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name.startswith("mask."):
                parameter.copy_(normal(*parameter.shape, seed=3))
        if combo[1].endswith("gate") and mixer.n_heads > 1:
            mixer.mask.logit[0].abs_()
    return mixer.to(dtype)


def tokens(length=7, seed=1, dtype=torch.float64):
    return normal(2, length, 16, seed=seed, dtype=dtype)


PADDING = (
    rows("..#####", "#######"),
    rows("####...", "######."),
    rows("##.#..#", ".#.##.#"),
    rows(".......", ".##.#.#"),
)


def padding_changes_nothing(m, combo, *masks):
    for real in masks or PADDING:
        properties.padding_changes_nothing(layer(m, combo), tokens(real.shape[1]), real)


def calls_join_up(m, combo, cuts=(2, 5), real=PADDING[2]):
    x = tokens(7 if real is None else real.shape[1])
    properties.calls_join_up(layer(m, combo), x, cuts, real)


EXTREMES = {
    "masks that hide everything": (("logit", -1e4), ("dt_bias", 1e4)),
    "masks that hide nothing": (("logit", 1e4), ("dt_bias", -1e4)),
    "large weights": (("proj.weight", None),),
}


def stays_finite(m, combo):
    for name, dtype in itertools.product(EXTREMES, (torch.float64, torch.float32)):
        mixer, real = layer(m, combo, dtype), PADDING[3]
        with torch.no_grad():
            for (k, p), (end, n) in itertools.product(mixer.named_parameters(), EXTREMES[name]):
                if k.endswith(end):
                    p.mul_(1e4) if n is None else p.fill_(n)
        x = tokens(dtype=dtype).masked_fill(~real[..., None], math.nan).requires_grad_()
        y, _ = forward(mixer, x, real)
        y.sum().backward()
        for k, t in (("y", y), ("x", x.grad), *((k, p.grad) for k, p in mixer.named_parameters())):
            assert t.isfinite().all(), f"{name}: {k} or its gradient"


def not_learning(mixer, x):
    """The parameters that no gradient reaches, or one that is zero or not finite."""
    mixer.zero_grad()
    y = mixer(x, torch.arange(x.shape[1]).expand(x.shape[:2]))
    (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in mixer.named_parameters()}
    return [k for k, g in grads.items() if g is None or not 1e-9 < g.abs().max() < math.inf]


def every_parameter_learns(m, combo):
    for length in (2, 7):
        mixer, x = layer(m, combo), tokens(length)
        assert not_learning(mixer, x) == []
        if combo[1].endswith("gate"):  # the gates of the positions used, one by one
            used = mixer.mask.logit.grad != 0
            assert used[:, :length].all() and not used[:, length:].any()
        if combo[0] == "retrieved":  # the rows that were chosen
            chosen = (mixer.inner.weights(x) > 0).any(1).any(0)
            assert torch.equal(mixer.inner.values.grad.any(-1), chosen)
            assert torch.equal(mixer.inner.keys.grad.any(-1), chosen)


def padding_may_come_late(m, combo):
    mixer, x, real = layer(m, combo), tokens(), rows("####..#", "#####.#")
    _, cache = forward(mixer, x[:, :4])
    assert cache.real is None
    y, cache = forward(mixer, x[:, 4:], real[:, 4:], cache, start=4)
    want, real_now = forward(mixer, x, real)[0][:, 4:], real[:, 4:]
    check("padding in the second call", y[real_now], want[real_now])
    assert torch.equal(cache.real, real)


def compiles(m, combo):
    padding = None if combo[1] == "causal" else PADDING[2]
    is_one_graph(layer(m, combo), forward, tokens(), padding)


@pytest.mark.parametrize("combo", [c for c in COMBOS if c[2] == "g = 2"], ids=label)
def test_extremes_stay_finite_and_padding_may_come_late(combo):
    stays_finite(attention, combo)
    padding_may_come_late(attention, combo)


ONE_GRAPH = [
    *(("QCAttn", mask, "g = 2") for mask in ("rounded gate", "three keys")),
    *((inner, "causal", "g = 4") for inner in ("ssd", "retrieved")),
]


@pytest.mark.parametrize("combo", ONE_GRAPH, ids=label)
def test_layer_is_one_graph(combo):
    compiles(attention, combo)


@pytest.mark.parametrize(
    "combo", [("ssd", "three keys", "g = 2"), ("retrieved", "gate", "g = 2")], ids=label
)
def test_values_and_mask_may_be_modules_of_your_own(combo):
    """A module that takes a cache is called as a sequence mixer, and its cache is kept."""
    want, heads = layer(attention, combo), HEADS[combo[2]]
    mixer = attention.QCAttn(16, **heads, rope_base=50.0, inner=want.inner, mask=want.mask).double()
    mixer.load_state_dict(want.state_dict())
    check("a layer with its parts handed over", *(forward(m, tokens())[0] for m in (mixer, want)))
    properties.calls_join_up(mixer, tokens(), (2, 5), PADDING[2])


class Printed(torch.nn.Module):
    """WM Listings 6 and 7 with eq. 4: a mask of rounded ones, one row of the table per token.

    Rotation, biases and attention_mask (all ones) are left out; the table has n_values rows (E19).
    """

    def __init__(self, d=16, h=4, n_values=5, width=8, positions=16):
        super().__init__()
        self.h = h
        self.Q_proj, self.K_proj, self.out_proj = (
            torch.nn.Linear(d, d, bias=False) for _ in range(3)
        )
        self.dynamic_mask = torch.nn.Parameter(torch.ones(h, positions))
        self.V_queries = torch.nn.Linear(d, width, bias=False)
        self.V_keys = torch.nn.Parameter(torch.zeros(n_values, width))
        self.V_embed = torch.nn.Embedding(n_values, d)

    def rows(self, x):
        return (self.V_queries(x) @ self.V_keys.T).topk(1, dim=-1).indices

    def forward(self, x, position_ids):
        t, heads = x.shape[1], lambda u: u.unflatten(-1, (self.h, -1)).transpose(1, 2)
        V = x * self.V_embed(self.rows(x)).sum(dim=-2)
        Q, K, V = heads(self.Q_proj(x)), heads(self.K_proj(x)), heads(V)
        mask = torch.full((t, t), -torch.inf).triu(1)
        padding = mask + self.dynamic_mask.round()[None, :, None, :t]
        mask = mask.masked_fill(padding == 0, -torch.inf)
        weights = (Q @ K.mT / math.sqrt(Q.shape[-1]) + mask).softmax(dim=-1)
        return self.out_proj((weights @ V).transpose(1, 2).flatten(2))


def test_as_printed_neither_the_mask_nor_the_choice_of_values_learns():
    torch.manual_seed(0)
    printed = Printed()
    without = ["dynamic_mask", "V_keys", "V_queries.weight"]
    assert not_learning(printed, tokens(dtype=torch.float32)) == without
    assert all(dict(printed.named_parameters())[name].grad is None for name in without)
    assert printed.rows(tokens(dtype=torch.float32)).unique().numel() == 1


# --- the masks --------------------------------------------------------------------------------


def rounded_gates_hide_hard_and_learn_softly(m, combo):
    rounded, soft = layer(m, combo), layer(m, (combo[0], "gate", combo[2]))
    rounded.out_proj, soft.out_proj = torch.nn.Identity(), torch.nn.Identity()
    y, want = forward(rounded, tokens())[0], forward(soft, tokens())[0]
    must_differ("rounded", y, want)
    grads = (gradients(y, rounded.parameters()), gradients(want, soft.parameters()))
    check("gradient of rounded gates = of soft gates", *grads)
    y.square().sum().backward()
    shut = rounded.mask.logit[:, :7] < 0
    assert shut.any() and rounded.mask.logit.grad[:, :7][shut].all(), "a shut gate cannot open"
    with torch.no_grad():  # moving gates without crossing 1/2 changes nothing
        want = forward(rounded, tokens())[0]
        check("value of rounded gates", y.detach(), want)
        rounded.mask.logit.mul_(3)
        check("value of gates that were moved", forward(rounded, tokens())[0], want)


def shut_gates_leave_each_token_itself(m, combo):
    mixer = layer(m, combo)
    torch.nn.init.constant_(mixer.mask.logit, -3.0)
    y, cache = forward(mixer, tokens())
    values = cache.v.repeat_interleave(mixer.n_heads // cache.v.shape[2], dim=2)
    check("each token reads itself", y, mixer.out_proj(values.flatten(2)))


def keeps_the_best(m):
    """Of the allowed keys those of the smallest penalty, of equals the later."""
    bias = -normal(2, 3, 6).abs()
    tied = (bias * 2).round()
    real = rows("######", ".##.##")
    for n, b, t in itertools.product((1, 2, 3, 5), (bias, tied, 0 * bias), (6, 2)):
        for allowed in (causal(t, 6), causal(t, 6, real)):
            kept = m.ContentMask(4, 3, top_k=n).keeps(b, allowed)
            assert torch.equal(kept, definitions.best_keys(b, allowed.expand(2, 3, t, 6), n)), n
            count = allowed.sum(-1).clamp(max=n).expand(2, 3, t)
            assert torch.equal(kept.sum(-1), count)
    for n in (6, 9, None):
        assert m.ContentMask(4, 3, top_k=n).keeps(bias, causal(6, 6)) is None


def masks_are_the_loop(m):
    for s, seed in itertools.product(range(6), range(3)):
        for t in range(s + 1):
            real = normal(3, s, seed=seed) < (0.6, 0, -9)[seed]  # at last, nothing is real
            assert torch.equal(m.causal_mask(t, s), causal(t, s))
            assert torch.equal(m.causal_mask(t, s, real=real), causal(t, s, real)), (t, s)


def test_masks_hide_next_to_nothing_at_the_start():
    v, positions = torch.zeros(1, 3, 2, 4), torch.arange(3)[None]
    content, gate = attention.ContentMask(8, 2), attention.GateMask(2, 3)
    check("share of a key left", content(v, positions), torch.full((1, 2, 3), -0.1))
    check("gates", gate(v, positions).exp(), torch.full((1, 2, 3), 0.880797))


def test_gates_are_rounded_at_one_half():
    mask = attention.GateMask(1, 3, hard=True)
    torch.nn.init.constant_(mask.logit, 0.0)
    with torch.no_grad():
        mask.logit[0] += torch.tensor([-1e-3, 0, 1e-3])
    bias = mask(torch.zeros(1, 3, 1, 1), torch.arange(3)[None])
    assert mask.keeps(bias, causal(3, 3))[0, 0, 2].tolist() == [False, True, True]


@pytest.mark.parametrize(
    "combo",
    [(inner, "rounded gate", heads) for inner, heads in zip(INNER, (*HEADS, "g = 2"), strict=True)],
    ids=label,
)
def test_rounded_gates_hide_hard_and_learn_softly(combo):
    rounded_gates_hide_hard_and_learn_softly(attention, combo)
    shut_gates_leave_each_token_itself(attention, combo)


def test_keeping_as_many_keys_as_there_are_is_keeping_all():
    combo = ("linear", "content", "g = 2")
    for top_k in (7, 100):
        y, want = (forward(layer(attention, combo, top_k=n), tokens())[0] for n in (top_k, None))
        check(f"keeping {top_k} = keeping all", y, want)


def test_token_that_says_so_is_hidden_from_every_later_one():
    mixer, x, real = layer(attention, ("linear", "content", "g = 4")), tokens(), rows("##.####")
    w = mixer.mask.dt_proj.weight[0].detach()
    with torch.no_grad():
        mixer.mask.dt_proj.weight.copy_(w.expand(4, -1))
        x[:, 2] = torch.linalg.solve(mixer.inner.weight, 1e4 * w / w.norm())
    positions = torch.arange(7).expand(2, 7)
    said, padded = (mixer(x, positions, padding_mask=p)[0] for p in (None, real.expand(2, 7)))
    check("hidden = padded", said[:, 3:], padded[:, 3:])


def test_equal_keys_are_dropped_alike_in_prefill_and_decoding():
    """With whole numbers for weights, equal tokens have equal penalties to the last bit."""
    mixer = layer(attention, ("linear", "content", "g = 2"), top_k=2)
    with torch.no_grad():
        for weight in (mixer.inner.weight, mixer.mask.dt_proj.weight):
            weight.copy_((3 * weight).round())
    text = torch.tensor([[0, 1, 0, 0, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0, 1, 0, 0]])
    x = normal(2, 16, seed=4).round()[text]
    want, cache = forward(mixer, x)[0], None
    for t in range(text.shape[1]):
        y, cache = forward(mixer, x[:, t : t + 1], cache=cache, start=t)
        check("decoded = prefilled", y, want[:, t : t + 1])
    bias = mixer.mask(cache.v, cache.position_ids)
    assert all(row.unique().numel() == 2 for row in bias.flatten(0, 1))


# --- retrieved values -------------------------------------------------------------------------


def retrieved(m, k=2, n_values=5, h=2):
    torch.manual_seed(0)
    return m.RetrievedValues(16, n_heads=h, n_values=n_values, k_values=k).double()


def values_are_the_loop(m):
    for k, n_values, h in ((1, 5, 2), (2, 5, 2), (5, 5, 2), (1, 1, 1)):
        inner, x = retrieved(m, k, n_values, h), tokens(3).requires_grad_()
        assert inner.keys.shape == (h, n_values, 8 // h)  # half as wide as a head
        want, weights = (
            definitions.retrieved_values(dict(inner.named_parameters()), x, h, k),
            inner.weights(x),
        )
        check("retrieved values = loop", inner(x), want)
        grads = (gradients(y, [x, *inner.parameters()]) for y in (inner(x), want))
        check("gradients of retrieved values = of the loop", *grads)
        assert (weights >= 0).all() and ((weights > 0).sum(-1) == k).all()
        check("weights sum to 1", weights.sum(-1), torch.ones(2, 3, h, dtype=x.dtype))


def test_one_row_has_weight_one_and_queries_and_keys_do_not_learn_from_it():
    inner = retrieved(attention, k=1)
    inner(tokens()).square().sum().backward()
    assert not inner.query_proj.weight.grad.any() and not inner.keys.grad.any()
    assert inner.values.grad.any()


def test_rows_of_equal_score_are_superimposed_in_equal_parts():
    inner, x = retrieved(attention, k=5), tokens()
    torch.nn.init.zeros_(inner.keys)
    check("x ∘ mean of the rows", inner(x), x * inner.values.mean(1).flatten())


# --- what hides a mistake ------------------------------------------------------------------------


def test_a_door_that_refuses_one_head_is_caught():
    mutant = planted((door, attention), [("size < 1", "size <= 1")])
    with pytest.raises(ValueError, match="n_heads must be at least 1, got 1"):
        layer(mutant, ("linear", "causal", ONE))


# --- bad input --------------------------------------------------------------------------------

Q, K, POSITIONS = torch.zeros(2, 3, 4, 6), torch.zeros(2, 5, 2, 6), torch.arange(5).expand(2, 5)
values = partial(attention.RetrievedValues, 16, n_heads=2, n_values=5, k_values=2)
linear = partial(attention.InnerFuncAttn, d_model=16, n_heads=4, inner="linear")
gate = partial(attention.GateMask(4, 5), torch.zeros(2, 5, 2, 6))
called = partial(linear(), x=torch.zeros(2, 5, 16), position_ids=POSITIONS)
CACHE = called()[1]
EMPTY = torch.ones(3, 5).bool().index_fill(0, torch.tensor(1), False)

# fmt: off
BAD = [
    (attention.causal_mask, dict(n_queries=6, n_keys=5), "6 queries.* 5 keys"),
    *((form, dict(q=Q, k=K, v=K, allowed=causal(3, 5)) | bad, message)
      for form in FORMS for bad, message in (
        (dict(k=K[:, :2], v=K[:, :2]), "3 queries.* 2 keys"),
        (dict(k=K[:, :, [0, 1, 0]]), "heads of q = 4 must be a multiple of groups of k = 3"),
        (dict(v=K[:, :, :0]), "heads of q = 4 must be a multiple of groups of v = 0"),
        (dict(allowed=torch.ones(5, 5).bool()), r"\(2, 4, 3, 5\), got \(5, 5\)"),
        (dict(allowed=EMPTY), "leaves a query nothing to attend to"))),
    (values, dict(k_values=6), r"k_values must be in \[1, n_values = 5\], got 6"),
    (values, dict(n_heads=3), "d_model = 16 must be a multiple of n_heads = 3"),
    (linear, dict(d_model=18), "d_model = 18 must be a multiple of n_heads = 4"),
    (linear, dict(d_model=12), "d_model / n_heads must be even .* got 3"),
    (linear, dict(n_kv_heads=3), "n_heads = 4 must be a multiple of n_kv_heads = 3"),
    (linear, dict(mask="gate"), "mask='gate' needs max_positions"),
    (linear, dict(hard=True), "hard belongs to mask='gate', got mask=None"),
    (linear, dict(mask="content", hard=True), "hard belongs .*got mask='content'"),
    (linear, dict(top_k=2), "top_k = 2 belongs to mask='content', got mask=None"),
    (linear, dict(inner="retrieved", k_values=65), r"\[1, n_values = 64\], got 65"),
    (linear, dict(inner="ssd", d_state=5), "d_state must be even .*5"),
    (called, dict(cache=linear()(torch.zeros(1, 5, 16), POSITIONS[:1])[1]),
     r"cache\.k must be .* = \(2, s, 4, 4\), got shape \(1, 5, 4, 4\)"),
    (called, dict(cache=linear(n_kv_heads=2)(torch.zeros(2, 5, 16), POSITIONS)[1]),
     r"cache\.k must be .* = \(2, s, 4, 4\), got shape \(2, 5, 2, 4\)"),
    *((called, dict(cache=CACHE._replace(**{name: getattr(CACHE, name).double()})),
       rf"cache\.{name} must be torch\.float32 here, got torch.float64") for name in "kv"),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
def test_options_and_caches_that_do_not_fit_are_refused():
    for function, arguments, message in BAD:
        with pytest.raises(ValueError, match=message):
            function(**arguments)


def test_positions_are_looked_at_by_the_table_alone():
    for ids in (POSITIONS + 1, POSITIONS - 1):
        with pytest.raises(IndexError, match="out of range"):
            gate(position_ids=ids)
    mixer = linear().double()
    x = normal(2, 5, 16)
    check("positions from -1 = from 0", mixer(x, POSITIONS - 1)[0], mixer(x, POSITIONS)[0])


# --- edges -----------------------------------------------------------------------------------


def test_of_equal_tokens_the_same_are_kept_in_one_pass_and_in_decoding():
    for length, d in ((7, 16), (19, 24), (33, 64)):  # products of these sizes round differently
        torch.manual_seed(0)
        mixer = attention.QCAttn(d, n_heads=4, mask="content", top_k=3)
        mixer = mixer.double()
        kinds = torch.randn(2, d, dtype=torch.float64)
        x, ids = kinds[torch.arange(length) % 2][None], torch.arange(length)[None]
        want, (pieces, cache) = mixer(x, ids)[0], ([], None)
        for t in range(length):
            y, cache = mixer(x[:, t : t + 1], ids[:, t : t + 1], cache=cache)
            pieces.append(y)
        check(f"{length} tokens of two kinds", torch.cat(pieces, 1), want)


@pytest.mark.usefixtures("unchecked")
def test_a_gate_takes_positions_that_cannot_wrap():
    gate = attention.GateMask(2, 8)
    ids, v = torch.tensor([[0, 5, 3]]), torch.zeros(1, 3, 2, 4)
    assert torch.equal(gate(v, ids.int()), gate(v, ids))
    for dtype in (torch.int8, torch.int16, torch.uint8):
        with pytest.raises(ValueError, match=f"position_ids must be .* got {dtype}"):
            gate(v, ids.to(dtype))


def test_a_cache_does_not_follow_what_the_caller_does_to_his_tensors():
    mixer = attention.QCAttn(8, n_heads=2)
    x, ids, mask = torch.randn(1, 3, 8), torch.arange(3)[None].clone(), torch.ones(1, 3).bool()
    _, cache = mixer(x, ids, padding_mask=mask)
    ids += 1
    mask[:] = False
    assert cache.position_ids.tolist() == [[0, 1, 2]] and cache.real.all()


@pytest.mark.parametrize("inner", INNER)
def test_a_cache_made_under_autocast_serves_under_autocast_alone(inner):
    mixer = layer(attention, (inner, "content", "g = 2"), torch.float32)
    x = tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, cache = forward(mixer, x[:, :5])
        for t in (5, 6):
            y, cache = forward(mixer, x[:, t : t + 1], cache=cache, start=t)
            assert y.isfinite().all() and cache.k.dtype == cache.v.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"cache\.k must be torch\.float32 .* torch\.bfloat16"):
        forward(mixer, x[:, :1], cache=cache, start=7)


def test_a_cache_of_another_inner_function_is_refused():
    x, ids = torch.randn(1, 3, 8), torch.arange(3)[None]
    _, cache = attention.QCAttn(8, n_heads=2)(x, ids)
    with pytest.raises(ValueError, match="another inner function"):
        attention.InnerFuncAttn(8, n_heads=2, inner="ssd")(x, ids + 3, cache=cache)


def test_one_kept_key_teaches_nothing():
    mixer = attention.QCAttn(8, n_heads=2, mask="content", top_k=1)
    mixer(torch.randn(1, 5, 8), torch.arange(5)[None])[0].square().sum().backward()
    for name in ("q_proj.weight", "k_proj.weight", "mask.dt_proj.weight", "mask.A_log"):
        assert not mixer.get_parameter(name).grad.any(), name
