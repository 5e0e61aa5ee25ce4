"""Experts: retrieval against brute force, and what the table of layers does not ask.

As in test_ssd.py, the properties are functions of a module, and of a row of test_layers.py where
they speak of a layer. The planted mistakes hand them a copy of feed_forward, retrieval or experts.
"""

import itertools
import random
from functools import partial

import pytest
import test_layers
import test_operators
import torch
from properties import Work, normal, route_twice
from test_layers import built

from cheems_ref import experts, retrieval
from cheems_ref.verify import check, check_gradients

D, RETRIEVAL = 6, test_layers.PEER
LAYERS = test_layers.PLAIN_LAYERS
LONG = dict(n_experts=40**2)  # with 9, heads often choose the same


def integers(low, high, *shape, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


# --- product keys: properties of a module m ---------------------------------------------------


def drawn(r, width, h, n, dtype=torch.float64, seed=0, whole=False):
    """Queries and keys; whole numbers bring ties. In some tokens one half outweighs the other."""
    make = partial(integers, -1, 2) if whole else normal
    queries, keys = make(1, n, h, 2, width, seed=seed), make(h, 2, r, width, seed=seed + 1)
    if not whole:
        queries[..., 0, :] *= torch.logspace(-2, 2, n)[:, None, None]
    return queries.to(dtype), keys.to(dtype)


def all_sums(queries, keys):
    """All r² sums, from the halves' scores as product_key_topk computes them, at least float32."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    queries, keys = queries.to(wide), keys.to(wide)
    first, second = (queries.flatten(0, 1).permute(1, 2, 0, 3) @ keys.mT).unbind(1)
    sums = (first[..., :, None] + second[..., None, :]).flatten(-2)
    return sums.transpose(0, 1).unflatten(0, queries.shape[:2])


def finds_the_best(m, r=6, width=3, k=5, h=2, n=8, dtype=torch.float64, seed=0, whole=False):
    """The k largest sums, to the last bit, and k different pairs that have them."""
    queries, keys = drawn(r, width, h, n, dtype, seed, whole)
    sums, case = all_sums(queries, keys), (r, width, k, h)
    scores, indices = m.product_key_topk(queries, keys, k)
    largest = sums.sort(descending=True).values[..., :k]
    assert scores.dtype == sums.dtype and torch.equal(scores, largest), case
    assert torch.equal(scores, sums.gather(-1, indices)), case
    assert indices.sort().values.diff().all(), case


def finds_the_best_in_blocks(m):
    """Of whole numbers, whose products are exact for any number of tokens."""
    for tokens in (0, 1, 3, 13, 14, 1024):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(m, "SCORES_PER_BLOCK", tokens * 2 * 2 * 5)
            finds_the_best(m, r=5, k=6, h=2, n=14, whole=True)


def retrieval_has_the_gradient_of_brute_force(m):
    for r, k in ((5, 7), (72, 1), (2, 4)):
        forms = (
            lambda queries, keys, k=k: m.product_key_topk(queries, keys, k)[0],
            lambda queries, keys, k=k: all_sums(queries, keys).topk(k).values,
        )
        check_gradients("top-k = brute force", *forms, drawn(r, 3, 2, 4))


# --- neurons: properties of a module m --------------------------------------------------------


def neurons_are_inner_products(m):
    """With rows that repeat, strides that are not those of the shapes, and one token alone."""
    x, table, indices = normal(7, 4), normal(5, 4, seed=1), integers(0, 5, 7, 6)

    def definition(x, table, rows=indices):
        return (x[:, None] * table[rows]).sum(-1)

    def strided(x, table, rows=indices):
        return m.neurons(*(t.T.contiguous().T for t in (x, table, rows)))

    for n in (slice(0, 7), slice(3, 4)):  # a token alone goes another way
        forms = [
            lambda x, table, f=f, n=n: f(x[n], table, indices[n]).sum(0)
            for f in (strided, definition)
        ]
        got, want = (f(x[n], table, indices[n]) for f in (strided, definition))
        check("neurons = inner products", got, want)
        check_gradients("neurons = inner products", *forms, [x, table])


def largest(m, form, n=40, j=24, d=32):
    """The largest tensors of a forward pass and of both; n j d; in bytes."""
    shapes = (1, n, d), (16, d), (16, d), (1, n, 2, j // 2), (16, d)
    *tensors, gate = (normal(*shape).requires_grad_() for shape in shapes)
    with Work() as work:
        y = getattr(m, form)(*tensors, integers(0, 16, 1, n, 2, j // 2), gate=gate)
        forward = work.largest
        y.square().sum().backward()
    return forward, work.largest, 8 * n * j * d


def gathers_no_rows(m):
    forward, both, gathered = largest(m, "retrieved_experts")
    assert forward <= both <= 8 * 40 * 32 < gathered / 20, f"{forward}, {both} of {gathered} bytes"


# --- layers: properties of a module m and of a name -------------------------------------------


def each_expert_sees_its_tokens(m):
    """Each is called once with those that chose it; one that nobody chose gets none."""
    x, gates = normal(2, 5, D), normal(2, 5, 3).abs()
    indices = normal(2, 5, 6).argsort(-1)[..., :3]
    seen, factor = [], normal(7, D, seed=2)

    def expert(i, tokens):
        seen.append((i, tokens))
        return torch.sin(tokens * factor[i])

    y, want = m._mix_experts(x, gates, indices, expert, 7), torch.zeros_like(x)
    for b, l, k in itertools.product(range(2), range(5), range(3)):
        want[b, l] += gates[b, l, k] * torch.sin(x[b, l] * factor[indices[b, l, k]])
    check("mixture = sum over the chosen", y, want)
    assert [i for i, _ in seen] == list(range(7)) and len(seen[6][1]) == 0
    for i, tokens in seen:
        assert torch.equal(tokens, x[(indices == i).any(-1)])
    with torch.no_grad():
        check("without a gradient", m._mix_experts(x, gates, indices, expert, 7), want)
    assert [i for i, _ in seen[7:]] == sorted({*indices.flatten().tolist()}), "some in vain"


def shared_V_is_computed_once(m):
    """A cohesive layer applies V to every token once, however many experts the token goes to."""
    layer, seen = m.CohesiveMoE(D, 5, n_experts=4, k=3).double(), []
    layer.experts[0].V.register_forward_hook(lambda _, given, __: seen.append(given[0].shape))
    y = layer(x := normal(2, 7, D))
    assert seen == [(2, 7, D)], f"V was applied to {seen}"
    gates, indices = layer.route(x)
    for b, t in itertools.product(range(2), range(7)):
        answers = [layer.expert(i.item(), x[b, t][None])[0] for i in indices[b, t]]
        check("one token", y[b, t], sum(g * a for g, a in zip(gates[b, t], answers, strict=True)))


def what_is_idle_gets_no_gradient(m, name):
    """From one token, whose heads choose different neurons. (Queries and keys all work.)"""
    mixer = built(m, name, **LONG if "n_heads" in LAYERS[name][1] else {})
    tokens = (normal(1, 1, D, seed=seed) for seed in range(9))
    chosen_once = (x for x in tokens if mixer.route(x)[1].flatten().sort().values.diff().all())
    mixer(next(chosen_once)).square().sum().backward()
    choosing = ("keys", "query_proj.weight")
    experts = [p for key, p in mixer.named_parameters() if not key.endswith(choosing)]
    without = sum((p.grad == 0).sum().item() for p in experts)
    assert mixer.inactive_parameters() == without > 0


# --- balance: properties of a module m -----------------------------------------------------


def balance_is_the_formula(m, e=4):
    """e Σ f_i P_i, in value and gradient, which the counted choices f_i do not have."""
    gates, indices = normal(3, 5, 2).abs(), integers(0, e, 3, 5, 2)
    chosen = [indices == i for i in range(e)]

    def formula(gates):
        return e * sum(i.double().mean() * gates[i].sum() / gates.sum() for i in chosen)

    loss = partial(m.load_balancing_loss, indices=indices, n_experts=e)
    check("balance", loss(gates), formula(gates))
    check_gradients("balance", loss, formula, [gates])


# --- the module has them ----------------------------------------------------------------------


def test_many_random_retrievals_are_those_of_brute_force():
    draw = random.Random(0)
    for seed in range(400):
        r, width, h = draw.randint(1, 8), draw.randint(1, 5), draw.randint(1, 3)
        sizes = r, width, draw.randint(1, r * r), h, draw.randint(1, 3)
        dtype = (torch.float32, torch.float64)[seed % 2]
        finds_the_best(experts, *sizes, dtype, seed, whole=seed % 4 > 1)


def test_neurons_are_inner_products():
    neurons_are_inner_products(retrieval)


def test_retrieval_and_balance():
    finds_the_best(retrieval, 72, 3, 70, dtype=torch.bfloat16)
    finds_the_best_in_blocks(retrieval)
    retrieval_has_the_gradient_of_brute_force(retrieval)


def test_no_token_retrieves_nothing_and_has_no_neurons():
    for shape in ((0, 3, 2), (2, 0, 2), (2, 3, 0)):
        queries, keys = normal(*shape, 2, 4).requires_grad_(), normal(shape[2], 2, 5, 4)
        scores, indices = experts.product_key_topk(queries, keys, 7)
        scores.sum().backward()
        assert scores.shape == indices.shape == (*shape, 7) and queries.grad.shape == queries.shape
    x, table = normal(0, 4).requires_grad_(), normal(5, 4).requires_grad_()
    y = retrieval.neurons(x, table, torch.zeros(0, 3).long())
    y.sum().backward()
    assert y.shape == (0, 3) and x.grad.shape == (0, 4) and not table.grad.any()


def test_the_formula_copies_the_rows_of_every_token():
    """So that gathers_no_rows would see it."""
    forward, _, gathered = largest(retrieval, "naive_retrieved_experts")
    assert forward >= gathered


def test_retrieved_experts_keep_the_digits_of_sixteen_bits():
    inputs = test_operators.OPERATORS["retrieved_experts, gated"].inputs()
    indices = inputs.pop("indices").long()
    narrow = {name: t.bfloat16() for name, t in inputs.items()}
    wide = {name: t.double() for name, t in narrow.items()}
    got, want = (retrieval.retrieved_experts(**t, indices=indices) for t in (narrow, wide))
    check("bfloat16 = float64", got, want.bfloat16(), tol=1e-2)


def test_what_is_idle_gets_no_gradient():
    for name in ("MoE", "SharedExpertMoE", "CohesiveMoE", "ExpansiveMoE", "CDMMoE", "CDMoE"):
        what_is_idle_gets_no_gradient(experts, name)


def test_shared_V_is_computed_once():
    shared_V_is_computed_once(experts)


# --- modes and precisions ---------------------------------------------------------------------


def test_layers_run_in_inference_mode():
    for name in ("MoE", "CDMMoE"):
        mixer, x = built(experts, name), normal(2, 4, D, seed=1)
        with torch.inference_mode():
            y = mixer(x)
        check(f"{name} in inference mode", y, mixer(x), tol=1e-14)


def test_layers_run_under_autocast():
    for name in LAYERS:
        mixer, x = built(experts, name, torch.float32), normal(2, 4, D, dtype=torch.float32, seed=1)
        with torch.autocast("cpu", torch.bfloat16):
            y = mixer(x)
        y.float().square().sum().backward()
        grads = [p.grad for p in mixer.parameters() if p.grad is not None]
        assert y.isfinite().all() and all(g.isfinite().all() for g in grads), name


def routes_in_float32_under_autocast(m, name):
    """From tokens, or queries, that are rounded to sixteen bits the same experts are chosen."""
    mixer, x = built(m, name, torch.float32), normal(2, 200, D, dtype=torch.bfloat16, seed=1)
    queries = [part.query_proj for part in mixer.modules() if hasattr(part, "query_proj")]
    if queries:
        got, want = route_twice(mixer.route, *queries, x.float())
    else:
        with torch.autocast("cpu", torch.bfloat16):
            got = mixer.route(x)
        want = mixer.route(x.float())
    assert got[0].dtype == torch.float32
    assert torch.equal(got[1], want[1]), "other experts"
    check(f"gates of {name} under autocast = in float32", got[0], want[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_load_balancing_loss_of_many_tokens_keeps_its_digits(dtype):
    gates, indices = torch.full((1, 8192, 2), 0.4, dtype=dtype), torch.arange(2**14).view(1, -1, 2)
    loss = experts.load_balancing_loss(gates, indices % 4, 4)
    check("loss of an even load", loss, torch.ones_like(loss), tol=2e-2)


@pytest.mark.usefixtures("unchecked")
def test_retrieval_compiles_as_one_graph():
    """Forward and backward, for several tokens and for one."""
    mixer = built(experts, "CDMMoE", torch.float32)
    x = normal(2, 5, D, seed=1, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    for tokens in (x, x[:1, :1]):
        leaves = [tokens.clone().requires_grad_(), *mixer.parameters()]
        got, want = (
            (y, *torch.autograd.grad(y.square().sum(), leaves))
            for y in (compiled(leaves[0]), mixer(leaves[0]))
        )
        for a, e in zip(got, want, strict=True):
            check("compiled = as it is: y and gradients", a, e)


@pytest.mark.usefixtures("unchecked")
def test_retrieval_is_exported_with_a_length_of_its_own():
    mixer, x = built(experts, "CDMMoE"), normal(2, 7, D)
    shapes = {"x": {1: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(mixer, (x,), strict=True, dynamic_shapes=shapes).module()
    for l in (7, 3):
        check("exported", exported(x[:, :l]), mixer(x[:, :l]))


def test_neurons_refuse_a_second_derivative_that_they_do_not_have():
    x, table = normal(3, 4).requires_grad_(), normal(5, 4).requires_grad_()
    y = retrieval.neurons(x, table, integers(0, 5, 3, 2)).square().sum()
    (once,) = torch.autograd.grad(y, table, create_graph=True)
    with pytest.raises(NotImplementedError):
        once.sum().backward()


def test_private_width_is_half_of_the_model_rounded_up():
    for d, half in ((1, 1), (6, 3), (7, 4)):
        mixer = experts.CDMMoE(**RETRIEVAL | dict(d_model=d, d_ff=4))
        assert mixer.down.shape == (9, half)


# --- bad input --------------------------------------------------------------------------------


PEER = partial(experts.PEER, **RETRIEVAL)
PAIRS = partial(experts.product_key_topk, torch.zeros(2, 3, 2, 2, 4), torch.zeros(2, 2, 5, 4))
LOSS = partial(experts.load_balancing_loss, n_experts=4)
BYTES = torch.ones(1, 3, dtype=torch.uint8)
# fmt: off
BAD = [
    (partial(experts.MoE, **test_layers.ROUTED), dict(k=10), r"k must be a number in \[1, 5\]"),
    (PEER, dict(k=10), r"k must be a number in \[1, 9\], got 10"),
    (PEER, dict(n_experts=10), "n_experts must be a square.*10 is not, 9 and 16 are"),
    (PEER, dict(d_query=5), "d_query must be even, one half for each set of keys, got 5"),
    (partial(experts.CDMoE, **RETRIEVAL, d_ff=4), dict(form="parallel", residual=False),
     "residual=False belongs to form='serial'"),
    (PAIRS, dict(k=26), r"k must be a number in \[1, 25\], got 26"),
    (PAIRS, dict(k=0), r"k must be a number in \[1, 25\], got 0"),
    (LOSS, dict(gates=torch.ones(2, 3), indices=torch.zeros(3, 2).long()),
     r"share a shape .*\(2, 3\) and \(3, 2\)"),
    (LOSS, dict(gates=torch.ones(0, 2), indices=torch.zeros(0, 2).long()), "not empty"),
    # Which torch takes for a mask.
    (retrieval.neurons, dict(x=normal(1, 4), table=normal(3, 4), indices=BYTES), "torch.int64"),
]
# fmt: on


@pytest.mark.usefixtures("unchecked")
def test_what_does_not_fit_together_is_refused():
    for function, arguments, message in BAD:
        with pytest.raises(ValueError, match=message):
            function(**arguments)
