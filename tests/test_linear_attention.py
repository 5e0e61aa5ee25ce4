"""Linear attention: what each rule minimises, other libraries, work, digits, and mistakes.

As in test_ssd.py, the properties are functions of a module. That every form is its definition is
asked by the table of operators.
"""

import inspect
import math
import sys
import types
from functools import partial

import definitions
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planting import plant
from properties import leaves_alone, work, works_linearly

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
    form, b=2, l=13, h=3, n=3, p=4, *, g=(1e-3, 1.0), beta=(0.1, 1.5), keys=(0.5, 1.1),
    strong=None, zero_state=False, dtype=torch.float64, seed=0,
):  # fmt: skip
    """Seeded q, k, v, the gates that the form takes, and the state.

    -g is log-uniform and beta uniform between two bounds, or one number for all; the keys' lengths
    are uniform, None leaves them as they come. Every third token has g = -strong where that is
    given.
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
    gates = [dict(g=g, beta=beta)[name].to(wide) for name in TAKES[rule_of(form)]]
    state = torch.zeros_like(state) if zero_state else state
    return [*(t.to(dtype) for t in (q, k, v)), *gates, state.to(wide)]


def apply(m, form, *tensors, chunk_size=4, scale=SCALE):
    """Any form of module m: o and the final state."""
    *given, state = tensors
    options = dict(scale=scale, initial_state=state, return_final_state=True)
    return function_of(m, form, chunk_size)(*given, **options)


CASES = {
    "three chunks and a ragged end": {},
    "three blocks and a ragged end": dict(b=1, l=39, h=2, chunk_size=2),
    "chunks of 64": dict(b=1, l=150, h=1, chunk_size=64),
    "decay by e^-10000": dict(strong=1e4),
    "all is forgotten at times": dict(strong=math.inf),
}


def definition(form, q, k, v, *gates_and_state, scale=SCALE):
    *gates, state = gates_and_state
    rule = rule_of(form)
    gates = dict(zip(TAKES[rule], gates, strict=True))
    return definitions.linear_attention(rule, q, k, v, state, scale=scale, **gates)


def compared(m, form, case):
    """The form and the definition, as functions of the same tensors, and the tensors."""
    case = dict(CASES[case] if isinstance(case, str) else case)
    chunk_size = case.pop("chunk_size", 4)
    tensors = inputs(form, **case)
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


# --- the module has them ----------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_digits_and_options_that_the_table_does_not_ask_for(form):
    """Long chunks; no options; gates in sixteen bits; decays of every size beside one another."""
    agree(la, form, "chunks of 64")
    *given, state = inputs(form)
    got, want = function_of(la, form)(*given), definition(form, *given, 0 * state, scale=1.0)
    check("no state, scale 1", got, want[0])
    tensors = [t.half() for t in inputs(form, b=1, l=20, h=2, n=8, dtype=torch.float16)]
    *tensors, state = *tensors[:-1], tensors[-1].float()
    o, final = apply(la, form, *tensors, state)
    assert (o.dtype, final.dtype) == (torch.float16, torch.float32)
    truth = definition(form, *(t.double() for t in (*tensors, state)))
    check(f"{form} = float64 matrices, o", o, truth[0].half())
    check(f"{form} = float64 matrices, S", final, truth[1].float())
    keeps_its_digits(la, form)


@settings(deadline=None, max_examples=12, derandomize=True)
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


def test_quadratic_form_is_the_recurrence_without_a_softmax():
    quadratic_is_the_definition(la)
    q, k, v, _ = inputs("linear_attention")
    want = la.linear_attention(q, k, v)
    check("quadratic form = recurrence", la.linear_attention_quadratic(q, k, v), want)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=1.0)
    must_differ("with the softmax", o.transpose(1, 2), want)


@pytest.mark.parametrize("end", ["", " in chunks"])
def test_rules_do_what_they_are_derived_from(end):
    is_the_least_change_for_the_pair(la, "longhorn" + end)
    is_one_gradient_step(la, "delta_rule" + end)
    recalls_what_it_was_told(la, "delta_rule" + end)
    for rule in ("delta_rule", "longhorn"):
        does_not_grow(la, rule + end)


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


def largest_state(rule, keys):
    """‖S‖ after 200 tokens of normal keys in 16 dimensions and β = 1, scaled to length 1 or raw."""
    tensors = inputs(rule, b=1, l=200, h=1, n=16, p=16, keys=keys, beta=1.0, zero_state=True)
    return apply(la, rule, *tensors)[1].norm().item()


def test_raw_keys_blow_the_delta_rule_up_and_unit_keys_and_longhorn_do_not():
    assert largest_state("delta_rule", keys=(1.0, 1.0)) < 100
    assert largest_state("delta_rule", keys=None) > 1e20
    assert largest_state("longhorn", keys=None) < 100


@pytest.mark.parametrize("form", [f for f in FORMS if "g" in TAKES[rule_of(f)]])
def test_strong_decay_starts_afresh_and_stays_finite(form):
    *given, state = inputs(form, l=64, dtype=torch.float32, strong=math.inf)
    leaves = [t.requires_grad_() for t in (*given, state)]
    results = apply(la, form, *leaves, chunk_size=64)
    sum(r.sum() for r in results).backward()
    assert all(t.isfinite().all() for t in results)
    assert all(t.grad.isfinite().all() for t in leaves)
    assert leaves[-1].grad.any() and not leaves[3].grad[:, 1::3].any()  # of the state, and of g
    afresh = apply(la, form, *(t[:, 61:] for t in given), 0 * state)
    check("what came before is forgotten", results[0][:, 61:], afresh[0])


@pytest.mark.parametrize("form", FORMS)
def test_work_is_linear_in_the_number_of_chunks(form):
    costs_the_same_for_every_chunk(la, form)
    if form in CHUNKED:
        takes_steps_by_the_chunk(la, form)


def test_work_of_the_quadratic_form_is_not():
    def run(chunks):
        *tensors, _ = inputs("linear_attention", l=4 * chunks)
        return la.linear_attention_quadratic(*(t.requires_grad_() for t in tensors)).sum()

    with pytest.raises(AssertionError, match="operations and bytes added per chunk"):
        works_linearly(run)


def test_table_of_rules_is_complete():
    """RULES holds every rule once, with the gates that it takes, in order."""
    assert [rule.function.__name__ for rule in la.RULES.values()] == list(TAKES)
    for function, takes in la.RULES.values():
        parameters = inspect.signature(function).parameters
        names = [x.name for x in parameters.values() if x.kind == x.POSITIONAL_OR_KEYWORD]
        assert names == ["q", "k", "v", *takes] and parameters["chunk_size"].default is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("form", ["gated_delta_rule", "gated_delta_rule in chunks"])
def test_rule_compiles_to_one_graph(form, monkeypatch):
    copy = plant(la)  # in the module itself the import hook decorates inner functions at every call
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    tensors = inputs(form)
    compiled = torch.compile(partial(apply, copy, form), backend="eager", fullgraph=True)
    for name, a, e in zip("oS", compiled(*tensors), apply(la, form, *tensors), strict=True):
        check(f"compiled {form} = eager, {name}", a, e)


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


# --- bad input: what a signature does not say ---------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("form", FORMS)
def test_states_of_no_width_or_of_sixteen_bits_are_refused(form):
    function, (q, k, v, *gates, state) = function_of(la, form), inputs(form, l=5)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        function(q[..., :0], k[..., :0], v, *gates)
    with pytest.raises(ValueError, match="p must be at least 1, got 0"):
        function(q, k, v[..., :0], *gates)
    narrow = [t.bfloat16() for t in (q, k, v, *gates)]
    with pytest.raises(ValueError, match=r"initial_state must be torch\.float32 .*bfloat16"):
        function(*narrow, initial_state=state.bfloat16())
