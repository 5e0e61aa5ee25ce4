"""Linear attention: every rule against its matrices, what it minimises, and planted mistakes.

As in test_ssd.py, the properties are functions of a module. The positive tests hand them
`cheems_ref.linear_attention`, the negative controls a copy of it with one planted mistake.
"""

import inspect
import itertools
import math
import sys
import types
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import plant
from properties import leaves_alone, one_entry, work, works_linearly

import cheems_ref.linear_attention as la
from cheems_ref.kernels import kernel_status, launching
from cheems_ref.ssd import ssd_recurrent
from cheems_ref.verify import check, check_gradients, must_differ

TAKES = {  # every rule and its gates, in the order of its arguments
    "linear_attention": (),
    "gated_linear_attention": ("g",),
    "longhorn": ("beta",),
    "delta_rule": ("beta",),
    "gated_delta_rule": ("g", "beta"),
}
CHUNKED = [f"{rule} in chunks" for rule in TAKES]
FORMS = [*TAKES, *CHUNKED]
SCALE = 0.7
STATUS = kernel_status()


def rule_of(form):
    return form.removesuffix(" in chunks")


def function_of(m, form, chunk_size=4):
    """The function of module m that a form is, chunk size included."""
    function = getattr(m, form.removesuffix(" in chunks"))
    return partial(function, chunk_size=chunk_size) if form in CHUNKED else function


def inputs(
    form,
    b=2,
    l=13,
    h=3,
    n=3,
    p=4,
    *,
    g=(1e-3, 1.0),
    beta=(0.1, 1.5),
    keys=(0.5, 1.1),
    strong=None,
    idle=(),
    zero_state=False,
    dtype=torch.float64,
    seed=0,
):
    """Seeded q, k, v, the gates that the form takes, and the state.

    -g is log-uniform and beta uniform between two bounds, or one number for all; the keys' lengths
    are uniform, None leaves them as they come. Every third token has g = -strong where that is
    given, and beta is 0 at the tokens `idle`.
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    q, k, v, state = normal(b, l, h, n), normal(b, l, h, n), normal(b, l, h, p), normal(b, h, p, n)
    if keys is not None:
        k = k / k.norm(dim=-1, keepdim=True) * uniform(*keys, b, l, h, 1)
    if isinstance(g, tuple):
        g = -uniform(math.log(g[0]), math.log(g[1]), b, l, h).exp()
    else:
        g = torch.full((b, l, h), -g, dtype=torch.float64)
    if strong is not None:
        g[:, 1::3] = -strong
    low, high = beta if isinstance(beta, tuple) else (beta, beta)
    beta = uniform(low, high, b, l, h)
    beta[:, list(idle)] = 0
    gates = [dict(g=g, beta=beta)[name].to(wide) for name in TAKES[rule_of(form)]]
    state = torch.zeros_like(state) if zero_state else state
    return [*(t.to(dtype) for t in (q, k, v)), *gates, state.to(wide)]


def definition(form, q, k, v, *gates_and_state, scale=SCALE):
    """S_t = S_{t-1} M + w v kᵀ with the n × n matrices M of the lecture's table, written out."""
    *gates, state = gates_and_state
    rule, (b, length, h, n) = rule_of(form), q.shape
    gates = dict(zip(TAKES[rule], gates, strict=True))
    identity = torch.eye(n, dtype=state.dtype)
    o, final = [], []
    for i, j in itertools.product(range(b), range(h)):
        S = state[i, j]
        for t in range(length):
            q_t, k_t, v_t = q[i, t, j], k[i, t, j], v[i, t, j]
            M, weight = identity, 1.0
            if "beta" in gates:
                weight = gates["beta"][i, t, j]
                if rule == "longhorn":
                    weight = weight / (1 + weight * (k_t @ k_t))
                M = identity - weight * torch.outer(k_t, k_t)
            if "g" in gates:
                M = gates["g"][i, t, j].exp() * M
            S = S @ M + weight * torch.outer(v_t, k_t)
            o.append(scale * (S @ q_t))
        final.append(S)
    if not o:
        return v, state
    o = torch.stack(o).reshape(b, h, length, v.shape[-1])
    return o.transpose(1, 2), torch.stack(final).reshape(state.shape)


def apply(m, form, *tensors, chunk_size=4, scale=SCALE):
    """Any form of module m: o and the final state."""
    *given, state = tensors
    options = dict(scale=scale, initial_state=state, return_final_state=True)
    return function_of(m, form, chunk_size)(*given, **options)


# The ways in which a length meets a chunk, and how much is forgotten and corrected.
CASES = {
    "three chunks and a ragged end": {},
    "l a multiple of the chunk": dict(l=12),
    "l = chunk": dict(l=4),
    "l < chunk": dict(l=3),
    "l = 1": dict(l=1),
    "l = 0": dict(l=0),
    "chunk = 1": dict(chunk_size=1),
    "three blocks and a ragged end": dict(b=1, l=39, h=2, chunk_size=2),
    "chunks of 64": dict(b=1, l=150, h=1, chunk_size=64),
    "no initial state": dict(zero_state=True),
    "g = 0": dict(g=0.0),
    "hardly any decay": dict(g=1e-3),
    "decay by e^-30": dict(g=(1.0, 30.0)),
    "decay by e^-10000": dict(strong=1e4),
    "all is forgotten at times": dict(strong=math.inf),
    "beta = 0 at some tokens": dict(idle=(0, 3, 4, 5, 12)),
    "beta = 0": dict(beta=0.0),
    "beta ‖k‖² = 2": dict(keys=(1.0, 1.0), beta=2.0),
    "one of everything": dict(b=1, l=5, h=1, n=1, p=1, chunk_size=2),
}


def compared(m, form, case):
    """The form and the definition, as functions of the same tensors, and the tensors."""
    case = CASES[case] if isinstance(case, str) else case
    chunk_size = case.get("chunk_size", 4)
    tensors = inputs(form, **{k: v for k, v in case.items() if k != "chunk_size"})
    return partial(apply, m, form, chunk_size=chunk_size), partial(definition, form), tensors


def agree(m, form, case="three chunks and a ragged end"):
    """The form's o and final state are those of the lecture's table."""
    actual, expected, tensors = compared(m, form, case)
    for a, e, name in zip(actual(*tensors), expected(*tensors), ("o", "S"), strict=True):
        check(f"{form} = its matrices, {name}", a, e)


def agree_in_gradient(m, form, case="three chunks and a ragged end"):
    """So are its derivatives, by all inputs and through both results."""
    actual, expected, tensors = compared(m, form, case)
    check_gradients(f"{form} = its matrices", actual, expected, tensors)


def agree_on(case):
    return lambda m, form: agree(m, form, case)


def agree_in_gradient_on(case):
    return lambda m, form: agree_in_gradient(m, form, case)


def updates(m, form, **case):
    """The form's states before and after every token, in one batch: S, k, v, beta, S'."""
    *given, first = inputs(form, **case)
    k, v, beta = given[1], given[2], given[-1]
    states = [apply(m, form, *(t[:, :i] for t in given), first)[1] for i in range(k.shape[1] + 1)]
    states = torch.stack(states, dim=1)
    return states[:, :-1], k, v, beta, states[:, 1:]


def is_the_least_change_for_the_pair(m, form):
    """S_t = argmin ‖S - S_{t-1}‖² + β ‖S k - v‖²: by least squares, and its gradient there is 0."""
    before, k, v, beta, after = updates(m, form, beta=(0.1, 20.0), keys=None)
    root = beta.sqrt()[..., None]
    identity = torch.eye(k.shape[-1], dtype=k.dtype).expand(*k.shape[:3], -1, -1)
    system = torch.cat([identity, (root * k)[..., None, :]], dim=-2)
    target = torch.cat([before.mT, (root * v)[..., None, :]], dim=-2)
    check("S_t = argmin, solved", after, torch.linalg.lstsq(system, target).solution.mT)

    S = after.clone().requires_grad_()
    miss = torch.einsum("blhpn,blhn->blhp", S, k) - v
    loss = (S - before).square().sum() + (beta * miss.square().sum(-1)).sum()
    (slope,) = torch.autograd.grad(loss, S)
    check("slope of the objective at S_t = 0", slope, torch.zeros_like(slope), atol=1e-10)


def is_one_gradient_step(m, form):
    """S_t = S_{t-1} - β ∇ ½‖S k - v‖², the gradient taken at S_{t-1}."""
    before, k, v, beta, after = updates(m, form)
    S = before.clone().requires_grad_()
    loss = (torch.einsum("blhpn,blhn->blhp", S, k) - v).square().sum() / 2
    (slope,) = torch.autograd.grad(loss, S)
    check("S_t = one gradient step", after, before - beta[..., None, None] * slope)


def recalls_what_it_was_told(m, form):
    """With orthonormal keys and β = 1 every value is read again, the last one under each key."""
    q, k, v, *gates, state = inputs(form, l=4, n=4)
    k = torch.linalg.qr(k.transpose(1, 2)).Q.transpose(1, 2)
    beta = torch.ones_like(gates[-1])
    S = apply(m, form, q, k, v, beta, 0 * state)[1]
    check("S k = v", torch.einsum("bhpn,blhn->blhp", S, k), v)
    S = apply(m, form, q, k, v.flip(1), beta, S)[1]
    check("S k = the last v", torch.einsum("bhpn,blhn->blhp", S, k), v.flip(1))


def does_not_grow(m, form):
    """Without new values the state never grows: β ‖k‖² ≤ 2 for the delta rule, any for Longhorn."""
    anything = dict(keys=None, beta=(0.0, 50.0))
    case = anything if rule_of(form) == "longhorn" else dict(keys=(1.0, 1.0), beta=(0.0, 2.0))
    *given, first = inputs(form, l=20, **case)
    given[2] *= 0
    states = [apply(m, form, *(t[:, :i] for t in given), first)[1] for i in range(21)]
    sizes = torch.stack([S.flatten(2).norm(dim=-1) for S in states])
    assert (sizes.diff(dim=0) <= 1e-12).all(), f"{form}: ‖S‖ grows to {sizes.max():.3g}"
    assert (sizes[-1] < 0.9 * sizes[0]).all()


def is_causal(m, form):
    """Moving token j, in all its inputs, moves o_j and nothing that came before."""
    *given, state = inputs(form)
    before = apply(m, form, *given, state)[0]
    for j in range(13):
        moved = [t.clone() for t in given]
        for name, t in zip(("q", "k", "v", *TAKES[rule_of(form)]), moved, strict=True):
            t[:, j] += -0.5 if name == "g" else 0.5
        after = apply(m, form, *moved, state)[0]
        check(f"token {j} moves nothing before it", after[:, :j], before[:, :j])
        must_differ(f"token {j} moved", after[:, j], before[:, j])


def rows_and_heads_do_not_meet(m, form):
    """Another row, or another head, changes nothing in this one."""
    tensors = inputs(form)
    before = apply(m, form, *tensors)
    for axis in ("row", "head"):
        moved = [t.clone() for t in tensors]
        for i, t in enumerate(moved):
            part = t[1] if axis == "row" else t[:, :, 1] if i < len(moved) - 1 else t[:, 1]
            part *= 1.25
        after = apply(m, form, *moved)
        for a, e, is_o in zip(after, before, (True, False), strict=True):
            heads = 2 if is_o else 1
            a, e = (t if axis == "row" else t.transpose(0, heads) for t in (a, e))
            others = [i for i in range(a.shape[0]) if i != 1]
            check(f"the {axis}s that stayed", a[others], e[others])
            must_differ(f"the {axis} that moved", a[1], e[1])


def leaves_its_inputs_alone(m, form):
    leaves_alone(partial(apply, m, form), *inputs(form))


def has_dtypes_and_accuracy(m, form, dtype=torch.bfloat16, narrow=False):
    """o has the dtype of q, the state that of the sums; both are right for the rounded inputs."""
    *tensors, state = inputs(form, l=40, n=8, dtype=dtype)
    if narrow:  # the gates in the dtype of q too
        tensors = [t.to(dtype) for t in tensors]
    for start in (None, state):
        o, final = apply(m, form, *tensors, start)
        assert (o.dtype, final.dtype) == (dtype, torch.float32), f"{o.dtype}, {final.dtype}"
        first = 0 * state if start is None else start
        truth = definition(form, *(t.double() for t in (*tensors, first)))
        check(f"{form} = float64 matrices, o", o, truth[0].to(dtype))
        check(f"{form} = float64 matrices, S", final, truth[1].float())


def keeps_its_digits(m, form):
    """float32 stays exact to rounding where a chunk mixes decays that differ by ten orders."""
    tensors = inputs(form, b=1, l=128, h=2, n=8, g=(1e-6, 1e4), dtype=torch.float32)
    truth = apply(la, rule_of(form), *(t.double() for t in tensors))
    got = apply(m, form, *tensors, chunk_size=64)
    for name, a, e in zip(("o", "S"), got, truth, strict=True):
        check(f"{form} with mixed decays, {name}", a.double(), e, tol=2e-6)


def summed(m, form, size=4):
    """All that a form gives for so many times `size` tokens, in chunks of `size`, added up."""

    def run(chunks):
        tensors = [t.requires_grad_() for t in inputs(form, l=size * chunks)]
        o, S = apply(m, form, *tensors, chunk_size=size)
        return o.sum() + S.sum()

    return run


def costs_the_same_for_every_chunk(m, form):
    """Forward and backward; so does every block of chunks."""
    run = summed(m, form)
    works_linearly(run)
    if form in CHUNKED:
        works_linearly(lambda blocks: run(la.CHUNKS_PER_BLOCK * blocks))


def takes_steps_by_the_chunk(m, form):
    """64 tokens in 4 chunks take far fewer operations than 64 tokens one by one."""
    in_chunks = work(summed(m, form, size=16), 4).operations
    one_by_one = work(summed(la, rule_of(form), size=16), 4).operations
    assert in_chunks < one_by_one / 3, f"{in_chunks} operations, one by one {one_by_one}"


def scale_is_a_factor_on_the_output(m, form):
    tensors = inputs(form)
    o, S = apply(m, form, *tensors, scale=1.0)
    for scale in (2.5, -3, 0):
        got = apply(m, form, *tensors, scale=scale)
        check(f"o times {scale}", got[0], scale * o)
        check("S is free of the scale", got[1], S)
    *given, state = tensors
    check("scale = 1 if not given", function_of(m, form)(*given, initial_state=state), o)


def calls_join_up(m, form, pieces=(5, 0, 8)):
    """Calls that hand the state on give what one call gives."""
    *given, state = inputs(form)
    want, want_state = apply(m, form, *given, state)
    parts = zip(*(t.split(list(pieces), dim=1) for t in given), strict=True)
    outputs = []
    for part in parts:
        o, state = apply(m, form, *part, state)
        outputs.append(o)
    check("o over several calls = over one", torch.cat(outputs, dim=1), want)
    check("S over several calls = over one", state, want_state)


def quadratic_is_the_definition(m):
    """Values, gradients, dtypes and accuracy of the form that takes no state."""
    form = "linear_attention"
    ours = partial(m.linear_attention_quadratic, scale=SCALE)

    def expected(q, k, v):
        return definition(form, q, k, v, q.new_zeros(*q.shape[::2], v.shape[-1], q.shape[-1]))[0]

    for length in (0, 1, 13):
        *tensors, _ = inputs(form, l=length)
        leaves_alone(ours, *tensors)
        check(f"quadratic form = its matrices, l = {length}", ours(*tensors), expected(*tensors))
        if length:
            check_gradients("quadratic form = its matrices", ours, expected, tensors)
    *tensors, _ = inputs(form, l=40, n=8, dtype=torch.bfloat16)
    o, want = ours(*tensors), expected(*(t.double() for t in tensors))
    check("quadratic form in bfloat16", o, want.bfloat16())


def table_is_complete(m, form=None):
    """RULES holds every rule once, with the gates that it takes, in order."""
    assert [rule.function.__name__ for rule in m.RULES.values()] == list(TAKES)
    for function, takes in m.RULES.values():
        parameters = inspect.signature(function).parameters
        names = [x.name for x in parameters.values() if x.kind == x.POSITIONAL_OR_KEYWORD]
        assert names == ["q", "k", "v", *takes]
        assert parameters["chunk_size"].default is None
        q, k, v, *gates, state = inputs(function.__name__)
        named = dict(zip(TAKES[function.__name__], gates, strict=True))
        given = q, k, v, *(named[name] for name in takes)
        both = (function(*given, chunk_size=size, initial_state=state) for size in (None, 4))
        check("in chunks = token by token", *both)


# --- the module has them ----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", FORMS)
def test_form_is_the_row_of_the_table(form, case):
    agree(la, form, case)


@pytest.mark.parametrize("case", [c for c in CASES if c != "l = 0"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_the_row(form, case):
    agree_in_gradient(la, form, case)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_equal_difference_quotients(form):
    function, _, tensors = compared(la, form, dict(b=1, l=5, h=2, n=2, p=2, g=(0.1, 1.0)))
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors])


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    b=st.integers(1, 2),
    l=st.integers(0, 20),
    h=st.integers(1, 3),
    n=st.integers(1, 4),
    p=st.integers(1, 4),
    chunk_size=st.integers(1, 25),
    g=st.sampled_from([0.0, 1e-3, (1e-3, 1e-1), (0.1, 1.0), (1.0, 100.0)]),
    beta=st.sampled_from([0.0, 1.0, (0.0, 1.0), (0.0, 1.6)]),
    seed=st.integers(0, 99),
)
def test_forms_agree_with_the_table_on_any_sizes(**case):
    for form in FORMS:
        agree(la, form, case)


def test_quadratic_form_is_the_recurrence():
    quadratic_is_the_definition(la)
    q, k, v, _ = inputs("linear_attention")
    check(
        "quadratic form = recurrence",
        la.linear_attention_quadratic(q, k, v),
        la.linear_attention(q, k, v),
    )
    want = torch.zeros_like(v)
    for t, s in itertools.combinations_with_replacement(range(12, -1, -1), 2):  # s ≤ t
        want[:, t] += (q[:, t] * k[:, s]).sum(-1, keepdim=True) * v[:, s]
    check("Σ_{s≤t} v_s (k_s·q_t)", la.linear_attention_quadratic(q, k, v), want)
    must_differ("with the softmax", softmax_attention(q, k, v), want)


def softmax_attention(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    return o.transpose(1, 2)


@pytest.mark.parametrize("form", ["longhorn", "longhorn in chunks"])
def test_longhorn_minimises_its_objective(form):
    is_the_least_change_for_the_pair(la, form)


@pytest.mark.parametrize("form", ["delta_rule", "delta_rule in chunks"])
def test_delta_rule_is_one_gradient_step(form):
    is_one_gradient_step(la, form)


@pytest.mark.parametrize("form", ["delta_rule", "delta_rule in chunks"])
def test_delta_rule_recalls_exactly_under_orthonormal_keys(form):
    recalls_what_it_was_told(la, form)


@pytest.mark.parametrize("end", ["", " in chunks"])
def test_rules_are_special_cases_of_one_another(end):
    q, k, v, g, beta, state = inputs("gated_delta_rule")
    epsilon = beta / (1 + beta * k.square().sum(-1))

    def run(rule, *gates):
        return apply(la, rule + end, q, k, v, *gates, state)

    for name, general, special in (
        ("Mamba-2, g = 0", run("gated_linear_attention", 0 * g), run("linear_attention")),
        ("Gated DeltaNet, g = 0", run("gated_delta_rule", 0 * g, beta), run("delta_rule", beta)),
        ("DeltaNet, β = ε", run("delta_rule", epsilon), run("longhorn", beta)),
    ):
        for actual, expected in zip(general, special, strict=True):
            check(name, actual, expected)


@pytest.mark.parametrize("end", ["", " in chunks"])
def test_linear_attention_is_ssd_without_decay_and_gated_linear_attention_is_ssd(end):
    q, k, v, g, state = inputs("gated_linear_attention")
    plain, gated = (function_of(la, f"{name}{end}") for name in tuple(TAKES)[:2])
    options = dict(initial_state=state, return_final_state=True)

    def same(name, ours, theirs):
        for what, actual, expected in zip(("o = y", "S = h"), ours, theirs, strict=True):
            check(f"{name}: {what}", actual, expected)

    dt, A = -g, -torch.tensor([0.1, 1.0, 16.0], dtype=g.dtype)
    same(
        "A = 0, dt = 1",
        plain(q, k, v, **options),
        ssd_recurrent(v, torch.ones_like(dt), 0 * A, k, q, **options),
    )
    same(
        "g = dt A, v = dt x",
        gated(q, k, dt[..., None] * v, dt * A, **options),
        ssd_recurrent(v, dt, A, k, q, **options),
    )
    same(
        "dt = -g, A = -1, x = v / dt, which takes g < 0",
        gated(q, k, v, g, **options),
        ssd_recurrent(v / dt[..., None], dt, A / A.abs(), k, q, **options),
    )


@pytest.mark.parametrize("form", [f for f in FORMS if TAKES[rule_of(f)] == ("beta",)])
def test_state_does_not_grow_where_the_docstring_says_so(form):
    does_not_grow(la, form)


def largest_state(rule, keys):
    """‖S‖ after 200 tokens of normal keys in 16 dimensions and β = 1, scaled to length 1 or raw."""
    tensors = inputs(rule, b=1, l=200, h=1, n=16, p=16, keys=keys, beta=1.0, zero_state=True)
    return apply(la, rule, *tensors)[1].norm().item()


def test_raw_keys_blow_the_delta_rule_up_and_unit_keys_and_longhorn_do_not():
    assert largest_state("delta_rule", keys=(1.0, 1.0)) < 100
    assert largest_state("delta_rule", keys=None) > 1e20
    assert largest_state("longhorn", keys=None) < 100


@pytest.mark.parametrize("form", FORMS)
def test_nothing_before_a_token_moves_with_it(form):
    is_causal(la, form)


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_heads_do_not_meet(form):
    rows_and_heads_do_not_meet(la, form)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_and_states_are_values(form):
    leaves_its_inputs_alone(la, form)
    for length in (0, 3):
        *given, state = inputs(form, l=length)
        copy = state.clone()
        for t in apply(la, form, *given, state):
            t += 1
        assert torch.equal(state, copy)


@pytest.mark.parametrize("pieces", [(13,), (5, 0, 8), (4, 4, 4, 1), (1,) * 13], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_passes_joined_by_the_state_equal_one(form, pieces):
    calls_join_up(la, form, pieces)


@pytest.mark.parametrize("form", FORMS)
def test_scale_is_a_factor_on_the_output(form):
    scale_is_a_factor_on_the_output(la, form)


@pytest.mark.parametrize("form", FORMS)
def test_options_left_out_mean_none(form):
    *given, state = inputs(form, l=70)
    o = function_of(la, form, chunk_size=64)(*given)
    assert isinstance(o, torch.Tensor)
    check("no state, scale 1", o, definition(form, *given, 0 * state, scale=1.0)[0])


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_results_have_their_dtypes_and_float32_accuracy_inside(form, dtype, narrow):
    has_dtypes_and_accuracy(la, form, dtype, narrow)


@pytest.mark.parametrize("form", FORMS)
def test_mixed_decays_cost_no_digits(form):
    keeps_its_digits(la, form)


@pytest.mark.parametrize("strong", [1e4, math.inf])
@pytest.mark.parametrize("form", [f for f in FORMS if "g" in TAKES[rule_of(f)]])
def test_strong_decay_starts_afresh_and_stays_finite(form, strong):
    *given, state = inputs(form, l=64, dtype=torch.float32, strong=strong)
    leaves = [t.requires_grad_() for t in (*given, state)]
    results = apply(la, form, *leaves, chunk_size=64)
    sum(r.sum() for r in results).backward()
    assert all(t.isfinite().all() for t in results)
    assert all(t.grad.isfinite().all() for t in leaves)
    assert leaves[-1].grad.any() and not leaves[3].grad[:, 1::3].any()  # of the state, and of g
    afresh = apply(la, form, *(t[:, 61:] for t in given), 0 * state)
    check("what came before is forgotten", results[0][:, 61:], afresh[0])


@pytest.mark.parametrize("form", [*TAKES, *CHUNKED])
def test_work_is_linear_in_the_number_of_chunks(form):
    costs_the_same_for_every_chunk(la, form)


def test_work_of_the_quadratic_form_is_not():
    def run(chunks):
        *tensors, _ = inputs("linear_attention", l=4 * chunks)
        return la.linear_attention_quadratic(*(t.requires_grad_() for t in tensors)).sum()

    with pytest.raises(AssertionError, match="operations and bytes added per chunk"):
        works_linearly(run)


@pytest.mark.parametrize("form", CHUNKED)
def test_steps_are_taken_by_the_chunk(form):
    takes_steps_by_the_chunk(la, form)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("form", ["gated_delta_rule", "gated_delta_rule in chunks"])
def test_rule_compiles_to_one_graph(form, monkeypatch):
    copy = plant(la)  # in the module itself the import hook decorates inner functions at every call
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    tensors = inputs(form)
    compiled = torch.compile(partial(apply, copy, form), backend="eager", fullgraph=True)
    for name, a, e in zip("oS", compiled(*tensors), apply(la, form, *tensors), strict=True):
        check(f"compiled {form} = eager, {name}", a, e)


@pytest.mark.parametrize("sizes", [dict(b=0), dict(h=0), dict(l=0)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_turns_into_nothing(form, sizes):
    *given, state = inputs(form, **sizes)
    o, S = apply(la, form, *given, state)
    assert o.shape == given[2].shape and torch.equal(S, state)


def test_table_of_rules_is_complete():
    table_is_complete(la)


# --- flash-linear-attention -------------------------------------------------------------------

# fla's scale is 1/√n if none is given, and its state is ours transposed. Its plain references are
# float32, whatever they are given. One row each: ours, and how theirs is called.
WITH_STATE = dict(scale=1.0, output_final_state=True)


def heads_first(f, q, k, v, beta, **state):
    """Call a function that has heads before length, and always scales by 1/√n."""
    q, k, v, beta = (t.transpose(1, 2) for t in (q * q.shape[-1] ** 0.5, k, v, beta))
    o, S = f(q, k, v, beta, **state)
    return o.transpose(1, 2), S


FLA_NAIVE = {
    "linear_attn.naive_recurrent_linear_attn": (
        "linear_attention",
        lambda f, q, k, v, g, beta, S: f(q, k, v, initial_state=S, **WITH_STATE),
    ),
    "simple_gla.naive_recurrent_simple_gla": (
        "gated_linear_attention",
        lambda f, q, k, v, g, beta, S: f(q, k, v, g, initial_state=S, **WITH_STATE),
    ),
    "simple_gla.naive_chunk_simple_gla": (
        "gated_linear_attention",
        lambda f, q, k, v, g, beta, S: f(q, k, v, g, initial_state=S, **WITH_STATE),
    ),
    "delta_rule.delta_rule_recurrence": (
        "delta_rule",
        lambda f, q, k, v, g, beta, S: heads_first(f, q, k, v, beta, initial_state=S),
    ),
    "delta_rule.delta_rule_chunkwise": (  # takes no state
        "delta_rule",
        lambda f, q, k, v, g, beta, S: heads_first(f, q, k, v, beta),
    ),
    "gated_delta_rule.naive_recurrent_gated_delta_rule": (  # beta before g
        "gated_delta_rule",
        lambda f, q, k, v, g, beta, S: f(q, k, v, beta, g, initial_state=S, **WITH_STATE),
    ),
    "gated_delta_rule.naive_chunk_gated_delta_rule": (  # g before beta
        "gated_delta_rule",
        lambda f, q, k, v, g, beta, S: f(q, k, v, g, beta, initial_state=S, **WITH_STATE),
    ),
}
FLA_KERNELS = {
    "fused_recurrent_linear_attn": "linear_attention",
    "chunk_linear_attn": "linear_attention",
    "fused_recurrent_simple_gla": "gated_linear_attention",
    "chunk_simple_gla": "gated_linear_attention",
    "fused_recurrent_delta_rule": "delta_rule",
    "chunk_delta_rule": "delta_rule",
    "fused_recurrent_gated_delta_rule": "gated_delta_rule",
    "chunk_gated_delta_rule": "gated_delta_rule",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", ["", " in chunks"])
@pytest.mark.parametrize("name", FLA_NAIVE)
def test_plain_references_of_fla_agree(name, end):
    place, _, function = name.partition(".")
    theirs = getattr(pytest.importorskip(f"fla.ops.{place}.naive"), function)
    rule, call = FLA_NAIVE[name]
    sizes = dict(l=128, n=16, p=24, dtype=torch.float32)
    q, k, v, g, beta, state = inputs("gated_delta_rule", **sizes)
    if function == "delta_rule_chunkwise":
        state = 0 * state
    o, S = call(theirs, q, k, v, g, beta, state.mT)
    named = dict(g=g, beta=beta)
    got = apply(la, rule + end, q, k, v, *(named[x] for x in TAKES[rule]), state, scale=1.0)
    # Both round, so both are in the error: 1e-6 of the largest entry where one of them is a loop.
    tol = 5e-6 if "chunk" in function else 1e-6
    check(f"fla's {function} = {rule}{end}, o", got[0], o, tol=tol)
    check(f"fla's {function} = {rule}{end}, S", got[1], S.mT, tol=tol)


class Int(int):
    """What a loop variable of a kernel is to the interpreter's kernels: a number with a `to`."""

    def to(self, dtype):
        return self


@pytest.fixture
def fla_ops(monkeypatch):
    """fla's kernels, made to run in the interpreter: no block sizes to time, loops that count."""
    if STATUS.mode != "interpreter":
        pytest.skip("only in the interpreter")
    ops = pytest.importorskip("fla.ops")
    from triton.runtime.autotuner import Autotuner

    for module in [m for name, m in sys.modules.items() if name.startswith("fla.")]:
        monkeypatch.setattr(module, "range", lambda *a: map(Int, range(*a)), raising=False)
        for kernel in list(vars(module).values()):
            while not isinstance(kernel, Autotuner | types.NoneType | types.FunctionType):
                kernel = getattr(kernel, "fn", None)
            if isinstance(kernel, Autotuner):
                monkeypatch.setattr(kernel, "configs", kernel.configs[:1])
    with launching({"x": torch.zeros(1)}):
        yield ops


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FLA_KERNELS)
def test_kernels_of_fla_agree_in_the_interpreter(fla_ops, name):
    rule = FLA_KERNELS[name]
    half = name == "chunk_delta_rule"  # which refuses float32
    dtype, tol = (torch.float16, 5e-3) if half else (torch.float32, 5e-6)
    sizes = dict(b=1, l=80, h=2, n=16, p=32, dtype=dtype)
    tensors = inputs(rule, **sizes)
    options = dict(normalize=False) if name == "chunk_linear_attn" else {}
    gates = TAKES[rule]

    def kernel(q, k, v, *rest):
        *rest, S = rest
        named = dict(zip(gates, rest, strict=True), initial_state=S.mT.contiguous())
        o, S = getattr(fla_ops, name)(q, k, v, **named, **WITH_STATE, **options)
        return o.float(), S.mT

    def ours(*tensors):
        o, S = apply(la, f"{rule} in chunks", *tensors, chunk_size=64, scale=1.0)
        return o.float(), S

    for what, actual, expected in zip("oS", kernel(*tensors), ours(*tensors), strict=True):
        check(f"fla's {name} = {rule}, {what}", actual, expected, tol=tol)
    if name != "fused_recurrent_gated_delta_rule":  # which has no backward
        check_gradients(f"fla's {name} = {rule}", kernel, ours, tensors, tol=tol)


# --- what hides a mistake ------------------------------------------------------------------------


def test_undecayed_system_hides_where_nothing_decays_and_exponents_where_little_does():
    from planted.linear_attention import DECAY, MASK_AFTER_EXP, RUNNING_SUMS, UNDECAYED

    agree(plant(la, UNDECAYED), "delta_rule in chunks")
    for edit in ((DECAY, RUNNING_SUMS), (DECAY, MASK_AFTER_EXP)):
        agree(plant(la, edit), "gated_delta_rule in chunks")
        agree_in_gradient(plant(la, edit), "gated_delta_rule in chunks")


# --- bad input --------------------------------------------------------------------------------


# One argument, what is done to a good one or a bad one, and what the message says.
# fmt: off
BAD = [
    ("q", lambda t: t[0], r"q must be \(b, l, h, n\), got shape \(5, 3, 2\)"),
    ("q", lambda t: t[..., :0], r"k must be .*\(2, 5, 3, 0\).*\(2, 5, 3, 2\)"),
    ("q", lambda t: t.long(), r"q must be floating-point.*int64"),
    ("k", lambda t: t[0], r"k must be .*\(2, 5, 3, 2\).*\(5, 3, 2\)"),
    ("k", lambda t: t[..., :1], r"k must be .*\(2, 5, 3, 2\).*\(2, 5, 3, 1\)"),
    ("k", lambda t: t.float(), r"k must be torch\.float64 .*float32"),
    ("v", lambda t: t[0], r"v must be \(b, l, h, p\) = .*got shape \(5, 3, 4\)"),
    ("v", lambda t: t[..., :0], "p must be at least 1, got 0"),
    ("v", lambda t: t[:1], r"v must be .*\(2, 5, 3, p\).*\(1, 5, 3, 4\)"),
    ("v", lambda t: t[:, :4], r"v must be .*\(2, 5, 3, p\).*\(2, 4, 3, 4\)"),
    ("v", lambda t: t[:, :, :2], r"v must be .*\(2, 5, 3, p\).*\(2, 5, 2, 4\)"),
    ("v", lambda t: t.bfloat16(), r"v must be torch\.float64 .*bfloat16"),
    ("g", lambda t: t[..., 0], r"g must be .*\(2, 5, 3\).*\(2, 5\)"),
    ("g", lambda t: t[..., None], r"g must be .*\(2, 5, 3\).*\(2, 5, 3, 1\)"),
    ("g", lambda t: t.float(), r"g must be torch\.float64 .*float32"),
    ("g", lambda t: t.long(), r"g must be floating-point.*int64"),
    ("g", one_entry(0.25), r"g must be in \[-inf, 0\] everywhere.*0\.25\]"),
    ("g", one_entry(math.inf), r"g must be in \[-inf, 0\] everywhere.* inf\]"),
    ("g", one_entry(math.nan), r"g must be in \[-inf, 0\] everywhere.*nan"),
    ("beta", lambda t: t.transpose(1, 2), r"beta must be .*\(2, 5, 3\).*\(2, 3, 5\)"),
    ("beta", lambda t: t.bool(), r"beta must be floating-point.*bool"),
    ("beta", lambda t: t.float(), r"beta must be torch\.float64 .*float32"),
    ("beta", one_entry(-0.5), r"beta must be in \[0, inf\) everywhere.*\[-0\.5"),
    ("beta", one_entry(math.inf), r"beta must be in \[0, inf\) everywhere.* inf\]"),
    ("beta", one_entry(math.nan), r"beta must be in \[0, inf\) everywhere.*nan"),
    ("initial_state", lambda t: t.mT, r"initial_state must be .*\(2, 3, 4, 2\).*\(2, 3, 2, 4\)"),
    ("initial_state", lambda t: t[0], r"initial_state must be .*\(2, 3, 4, 2\).*\(3, 4, 2\)"),
    ("initial_state", lambda t: t.float(), r"initial_state must be torch\.float64 .*float32"),
    ("scale", math.nan, "scale must be .*nan"),
    ("scale", math.inf, "scale must be .*inf"),
    ("scale", "1", "scale must be a number, got '1'"),
    ("chunk_size", 0, "chunk_size must be .*0"),
    ("chunk_size", -3, "chunk_size must be .*-3"),
    ("chunk_size", 2.5, r"chunk_size must be .*2\.5"),
]
# fmt: on


def arguments(form, **changes):
    names = ("q", "k", "v", *TAKES[rule_of(form)], "initial_state")
    named = dict(zip(names, inputs(form, l=5, n=2, p=4), strict=True))
    return named | {k: v(named[k]) if callable(v) else v for k, v in changes.items()}


@pytest.mark.usefixtures("unchecked")
class TestBadInput:
    @pytest.mark.parametrize("name, change, message", BAD)
    def test_is_refused_by_every_form_with_its_name_and_numbers(self, name, change, message):
        refused = 0
        for form in FORMS:
            function = function_of(la, form)
            if name not in inspect.signature(function).parameters:
                continue
            with pytest.raises((ValueError, TypeError), match=message):
                function(**arguments(form, **{name: change}))
            refused += 1
        assert refused >= 4

    @pytest.mark.parametrize("form", FORMS)
    def test_state_without_width_is_refused(self, form):
        named = {name: t[..., :0] for name, t in arguments(form).items() if name in "qk"}
        with pytest.raises(ValueError, match="n must be at least 1, got 0"):
            function_of(la, form)(**arguments(form, initial_state=None, **named))

    @pytest.mark.parametrize("form", FORMS)
    def test_sixteen_bit_state_is_refused(self, form):
        narrow = {name: t.bfloat16() for name, t in arguments(form).items()}
        with pytest.raises(ValueError, match=r"initial_state must be torch\.float32 .*bfloat16"):
            function_of(la, form)(**narrow)
