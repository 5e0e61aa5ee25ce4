"""Attention: what the tables of layers and operators do not ask.

As in test_ssd.py, the properties are functions of a module `m`. The planted mistakes hand them a
copy of `cheems_ref.attention`.
"""

import functools
import itertools
import math
from functools import partial

import definitions
import pytest
import torch
from properties import Work, forward, is_one_graph, normal, route_twice, rows
from test_layers import built

import cheems_ref.attention as attention
from cheems_ref import verify
from cheems_ref.verify import check, check_gradients

FORMS = (attention.attention, attention.naive_attention)


def tokens(length=7, seed=1, dtype=torch.float64):
    return normal(2, length, 16, seed=seed, dtype=dtype)


# --- rounded gates ----------------------------------------------------------------------------


def test_rounded_gates_give_the_same_values_with_and_without_a_gradient():
    """In sixteen bits, too, where y_soft + (y - y_soft) is not y."""
    torch.manual_seed(0)
    gates = dict(mask="gate", max_positions=9, hard=True)
    layer = attention.InnerFuncAttn(16, n_heads=2, inner="linear", **gates).bfloat16()
    torch.nn.init.normal_(layer.mask.logit, std=3.0)
    x, positions = tokens(dtype=torch.bfloat16), torch.arange(7).expand(2, -1)
    with torch.no_grad():
        y = layer(x, positions)[0]
    assert torch.equal(layer(x, positions)[0], y)


# --- the formula ------------------------------------------------------------------------------


def causal(t, s, real=None):
    """Which keys each query sees, by a loop: (t, s), or (b, 1, t, s) with `real`."""
    if real is None:
        return definitions.causal(t, s)
    allowed = definitions.causal(t, s) & real[:, None, None]
    for row, query in itertools.product(allowed[:, 0], range(t)):
        row[query, s - t + query] |= not row[query].any()
    return allowed


def slices_join(m, t=3, s=9, cuts=((4,), (1, 2, 6), (3, 8)), far=600.0):
    """For any cut of the keys and any order of joining, and where one score is far above the rest:
    without its maximum, exp of that one is infinite. Slices that a query doesn't see say nothing.
    """
    q, k, v = (normal(2, n, 4, 6, seed=i) for i, n in enumerate((t, s, s)))
    k[:, 5] += far
    allowed = some_allowed(t, s)
    want = m.naive_attention(q, k, v, allowed=allowed)
    scores = torch.einsum("bthp,bshp->bhts", q, k) / math.sqrt(6)
    scores = scores.masked_fill(~allowed, -torch.inf)
    for cut in cuts:
        ends = zip((0, *cut), (*cut, s), strict=True)
        pieces = [m.online_softmax(scores[..., a:b], v[:, a:b]) for a, b in ends]
        for order in itertools.permutations(pieces):
            whole = functools.reduce(m.join_softmax, order)
            check(f"cut at {cut}", whole.weighted / whole.total, want)
        first, *rest = pieces  # and from the other end
        later = functools.reduce(lambda one, other: m.join_softmax(other, one), rest[::-1])
        whole = m.join_softmax(first, later)
        check(f"cut at {cut}, the rest first", whole.weighted / whole.total, want)


def test_slices_of_a_softmax_join():
    slices_join(attention)


def some_allowed(t, s):
    """A mask for each of four heads, in which every query sees its own token."""
    own = torch.ones(t, s).tril(s - t).triu(s - t).bool()
    return (normal(2, 4, t, s, seed=9) < 0.5) & causal(t, s) | own


def forms_are_the_definition(m, t=5, s=5):
    """In values and gradients, with fewer groups than heads, masked or not, biased or not."""
    tensors = [normal(2, n, g, 6, seed=g) for n, g in ((t, 4), (s, 2), (s, 1))]
    for bias, allowed in itertools.product(([], [normal(2, 4, s)]), (None, some_allowed(t, s))):
        seen = causal(t, s) if allowed is None else allowed

        def definition(q, k, v, bias=None, seen=seen):
            return definitions.attention(q, k, v, seen, bias)

        for form, mask in ((m.attention, allowed), (m.naive_attention, seen)):
            title = f"{form.__name__} of {t} queries and {s} keys"

            def called(q, k, v, bias=None, form=form, mask=mask):
                return form(q, k, v, allowed=mask, bias=bias)

            check(title, called(*tensors, *bias), definition(*tensors, *bias))
            if t:
                check_gradients(title, called, definition, [*tensors, *bias])


@pytest.mark.parametrize(("t", "s"), [(2, 5), (1, 5), (0, 3)])
def test_both_forms_are_the_definition_with_fewer_queries_than_keys(t, s):
    forms_are_the_definition(attention, t, s)


def test_sixteen_bits_are_computed_in_float32_and_rounded_once():
    """By the formula; torch's operator is a few roundings off."""
    for dtype in (torch.float16, torch.bfloat16):
        tensors = [normal(2, n, g, 8, seed=g, dtype=dtype) for n, g in ((9, 4), (40, 2), (40, 1))]
        bias, allowed = normal(2, 4, 40, dtype=dtype), some_allowed(9, 40)
        want = definitions.attention(*(t.double() for t in tensors), allowed, bias.double())
        fused, got = (form(*tensors, allowed=allowed, bias=bias) for form in FORMS)
        half = torch.finfo(dtype).eps / 2
        assert ((got.double() - want).abs() <= half * want.abs() + 2e-6).all(), dtype
        check(f"SDPA in {dtype} = float64", fused, want.to(dtype))


def copies_no_groups(m):
    """One token decoded with grouped keys makes nothing of the size of its cache per head."""
    q, k, v = (normal(2, n, g, 8, seed=n + g) for n, g in ((1, 8), (64, 2), (64, 2)))
    for allowed, bias in itertools.product((None, causal(1, 64)), (None, normal(2, 8, 64))):
        with Work() as counter:
            m.attention(q, k, v, allowed=allowed, bias=bias)
        assert counter.largest < k.nbytes, f"{counter.largest} bytes, the keys are {k.nbytes}"


def bias_is_held(m, dtype=torch.float32, autocast=True):
    """A bias that sixteen bits would round away is held, also where autocast rounds."""
    q, k, v = normal(3, 1, 5, 2, 4, dtype=dtype)
    bias = -torch.tensor([1e5, 2e5, 100_003.0, 100_001.0, 1e5]).expand(1, 2, 5)
    options = dict(allowed=m.causal_mask(5, 5), bias=bias)
    want = m.naive_attention(q.float(), k.float(), v.float(), **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for form in (m.attention, m.naive_attention):
            got = form(q, k, v, **options)
            check(f"{form.__name__} in {dtype} = in float32", got, want.to(dtype))


def test_a_bias_beyond_sixteen_bits_is_held():
    for dtype, autocast in itertools.product((torch.float16, torch.bfloat16), (False, True)):
        bias_is_held(attention, dtype, autocast)


def test_masks_and_retrieval_are_in_float32_under_autocast():
    """Of what autocast has made: the penalties of values, and the rows that queries choose."""
    mask, v = attention.ContentMask(16, 4), normal(2, 9, 4, 4, dtype=torch.bfloat16)
    ids = torch.arange(9).expand(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        got = mask(v, ids)
    check("penalty under autocast = in float32", got, mask(v.float(), ids))
    torch.manual_seed(1)
    inner = attention.RetrievedValues(16, n_heads=2, n_values=50, k_values=4)
    got, want = route_twice(inner.weights, inner.query_proj, tokens(99, dtype=torch.float32))
    assert got.dtype == torch.float32 and torch.equal(got > 0, want > 0)
    check("weights under autocast = in float32", got, want)


# --- the layers -------------------------------------------------------------------------------

EXTREMES = {
    "masks that hide everything": dict(logit=-1e4, dt_bias=1e4),
    "masks that hide nothing": dict(logit=1e4, dt_bias=-1e4),
    "large weights": {},
}


@pytest.mark.parametrize("mask", ["gate", "rounded gate", "content", "three keys"])
@pytest.mark.parametrize("inner", ["ssd", "retrieved"])
def test_extremes_stay_finite(inner, mask):
    real = rows(".......", ".##.#.#")
    for (title, extreme), dtype in itertools.product(
        EXTREMES.items(), (torch.float64, torch.float32)
    ):
        mixer = built(attention, f"{inner}, {mask}, g = 2", dtype)
        named = dict(mixer.named_parameters())
        with torch.no_grad():
            for name, p in named.items():
                if name.removeprefix("mask.") in extreme:
                    p.fill_(extreme[name.removeprefix("mask.")])
                elif not extreme and name.endswith("proj.weight"):
                    p.mul_(1e4)
        x = tokens(dtype=dtype).masked_fill(~real[..., None], math.nan).requires_grad_()
        y, _ = forward(mixer, x, real)
        grads = torch.autograd.grad(y.sum(), [x, *named.values()])
        for name, t in zip(("y", "x", *named), (y, *grads), strict=True):
            assert t.isfinite().all(), f"{title}: {name} or its gradient"


def test_gates_and_rows_learn_where_they_are_used():
    for length in (2, 7):
        mixer, x = built(attention, "retrieved, gate, g = 2"), tokens(length)
        forward(mixer, x)[0].square().sum().backward()
        used = mixer.mask.logit.grad != 0
        assert used[:, :length].all() and not used[:, length:].any()
        chosen = (mixer.inner.weights(x) > 0).any(1).any(0)
        assert torch.equal(mixer.inner.values.grad.any(-1), chosen)
        assert torch.equal(mixer.inner.keys.grad.any(-1), chosen)


def test_one_choice_teaches_nothing_to_what_chooses():
    for options, choosing in (
        (dict(mask="content", k_keys=1), ("q_proj", "k_proj", "mask.")),
        (dict(inner="retrieved", k_values=1), ("inner.query_proj", "inner.keys")),
    ):
        mixer = attention.QCAttn(16, n_heads=2, **options).double()
        forward(mixer, tokens())[0].square().sum().backward()
        for name, p in mixer.named_parameters():
            assert (p.grad is None or not p.grad.any()) == name.startswith(choosing), name


def test_layer_is_one_graph():
    """With the longest of the inner functions and masks; test_compile.py has others."""
    mixer = built(attention, "ssd, three keys, g = 2")
    is_one_graph(mixer, forward, tokens(), rows("##.#..#", ".#.##.#"))


def test_values_and_mask_may_be_modules_of_your_own():
    """A module that takes a cache is called as a sequence mixer, and its cache is kept."""
    options = dict(n_heads=4, n_kv_heads=2, rope_base=50.0)
    for name in ("ssd, three keys, g = 2", "retrieved, gate, g = 2"):
        want = built(attention, name)
        mixer = attention.QCAttn(16, **options, inner=want.inner, mask=want.mask).double()
        mixer.load_state_dict(want.state_dict())
        check("with its parts handed over", *(forward(m, tokens())[0] for m in (mixer, want)))
        verify.pieces_equal_one_pass(mixer, tokens())


# --- the masks --------------------------------------------------------------------------------


def masks_are_the_loop(m):
    for s, real in itertools.product(range(6), (normal(3, 5) < 0.6, torch.zeros(3, 5).bool())):
        for t in range(s + 1):
            assert torch.equal(m.causal_mask(t, s), causal(t, s))
            want = causal(t, s, real[:, :s])
            assert torch.equal(m.causal_mask(t, s, real=real[:, :s]), want), (t, s)


def test_a_content_mask_keeps_the_allowed_keys_of_least_penalty_and_of_equals_the_later():
    """In float64 too, where the rounding of a matrix product tells equal tokens apart."""
    bias = -normal(2, 3, 6).abs()
    real, tied, noise = rows("######", ".##.##"), (bias * 2).round(), 1e-14 * normal(2, 3, 6)
    for n, b, t in itertools.product((1, 3, 5), (bias, tied, 0 * bias - 1), (6, 2)):
        for allowed in (causal(t, 6), causal(t, 6, real)):
            kept = attention.ContentMask(4, 3, k_keys=n).keeps(b * (1 + noise), allowed)
            assert torch.equal(kept, definitions.best_keys(b, allowed.expand(2, 3, t, 6), n)), n
    for n in (6, 9, None):
        assert attention.ContentMask(4, 3, k_keys=n).keeps(bias, causal(6, 6)) is None


def test_masks_hide_next_to_nothing_at_the_start():
    v, positions = torch.zeros(1, 3, 2, 4), torch.arange(3)[None]
    content, gate = attention.ContentMask(8, 2), attention.GateMask(2, 3)
    check("share of a key left", content(v, positions), torch.full((1, 2, 3), -0.1))
    check("gates", gate(v, positions).exp(), torch.full((1, 2, 3), 0.880797))


@pytest.mark.usefixtures("unchecked")
def test_a_gate_takes_positions_of_its_table_that_cannot_wrap():
    gate, v = attention.GateMask(2, 8), torch.zeros(1, 3, 2, 4)
    ids = torch.tensor([[0, 5, 3]])
    assert torch.equal(gate(v, ids.int()), gate(v, ids))
    for dtype in (torch.int8, torch.uint8):
        with pytest.raises(ValueError, match=f"position_ids must be .* got {dtype}"):
            gate(v, ids.to(dtype))
    for outside in (ids + 3, ids - 1):
        with pytest.raises(IndexError, match="out of range"):
            gate(v, outside)


# --- caches -----------------------------------------------------------------------------------


def test_a_cache_does_not_follow_what_the_caller_does_to_his_tensors():
    mixer, ids, mask = attention.QCAttn(16, n_heads=2).double(), torch.arange(7).repeat(2, 1), None
    mask = torch.ones(2, 7).bool()
    _, cache = mixer(tokens(), ids, padding_mask=mask)
    ids += 1
    mask[:] = False
    assert torch.equal(cache.position_ids, ids - 1) and cache.real.all()


@pytest.mark.parametrize("inner", ["ssd", "linear"])
def test_a_cache_made_under_autocast_serves_under_autocast_alone(inner):
    mixer = built(attention, f"{inner}, content, g = 2", torch.float32)
    x = tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, cache = forward(mixer, x[:, :5])
        for t in (5, 6):
            y, cache = forward(mixer, x[:, t : t + 1], cache=cache, start=t)
            assert y.isfinite().all() and cache.k.dtype == cache.v.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"cache\.k must be torch\.float32 .* torch\.bfloat16"):
        forward(mixer, x[:, :1], cache=cache, start=7)


# --- bad input --------------------------------------------------------------------------------

Q, K, POSITIONS = torch.zeros(2, 3, 4, 6), torch.zeros(2, 5, 2, 6), torch.arange(5).expand(2, 5)
values = partial(attention.RetrievedValues, 16, n_heads=2, n_values=5, k_values=2)
linear = partial(attention.InnerFuncAttn, d_model=16, n_heads=4, inner="linear")
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
    (linear, dict(mask="content", hard=True), "hard belongs .*got mask='content'"),
    (linear, dict(k_keys=2), "k_keys = 2 belongs to mask='content', got mask=None"),
    (called, dict(cache=linear()(torch.zeros(1, 5, 16), POSITIONS[:1])[1]),
     r"cache\.k must be .* = \(2, s, 4, 4\), got shape \(1, 5, 4, 4\)"),
    (called, dict(cache=linear(n_kv_heads=2)(torch.zeros(2, 5, 16), POSITIONS)[1]),
     r"cache\.k must be .* = \(2, s, 4, 4\), got shape \(2, 5, 2, 4\)"),
    *((called, dict(cache=CACHE._replace(**{name: getattr(CACHE, name).double()})),
       rf"cache\.{name} must be torch\.float32 here, got torch.float64") for name in "kv"),
    (called, dict(cache=CACHE._replace(inner=CACHE.k)), "another inner function"),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
def test_options_and_caches_that_do_not_fit_are_refused():
    for function, arguments, message in BAD:
        with pytest.raises(ValueError, match=message):
            function(**arguments)
