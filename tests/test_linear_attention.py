"""Linear attention: what each rule minimises, other libraries, work, digits.

The table of operators asks whether every form is its definition. The properties here are functions
of a module m: planted/ hands them copies with a mistake.
"""

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
from properties import normal, work, works_linearly

import cheems_ref.linear_attention as la
from cheems_ref.kernels import kernel_status, launching
from cheems_ref.ssd import ssd_recurrent
from cheems_ref.verify import check, check_gradients

TAKES = {  # every rule and its gates, in the order of its arguments
    "linear_attention": (),
    "gated_linear_attention": ("g",),
    "longhorn": ("beta",),
    "delta_rule": ("beta",),
    "gated_delta_rule": ("g", "beta"),
}
ENDS = ("", " in chunks")
FORMS = [rule + end for rule in TAKES for end in ENDS]
SCALE = 0.7


def rule_of(form):
    return form.removesuffix(" in chunks")


def inputs(
    form, b=2, l=13, h=3, n=3, p=4, *,
    g=(1e-3, 1.0), beta=(0.1, 1.5), keys=(0.5, 1.1), dtype=torch.float64, seed=0,
):  # fmt: skip
    """Seeded q, k, v, the gates that the form takes, and the state.

    -g is log-uniform between two bounds. beta and the lengths of the keys are uniform; keys=None
    leaves the keys as they come.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    shapes = (b, l, h, n), (b, l, h, n), (b, l, h, p), (b, h, p, n)
    q, k, v, state = (normal(*shape, seed=4 * seed + i) for i, shape in enumerate(shapes))
    if keys is not None:
        k = k / k.norm(dim=-1, keepdim=True) * uniform(*keys, b, l, h, 1)
    gates = dict(g=-uniform(*map(math.log, g), b, l, h).exp(), beta=uniform(*beta, b, l, h))
    wide = torch.promote_types(dtype, torch.float32)
    gates = [gates[name].to(wide) for name in TAKES[rule_of(form)]]
    return [*(t.to(dtype) for t in (q, k, v)), *gates, state.to(wide)]


def apply(m, form, *tensors, chunk_size=4, scale=SCALE):
    """Any form of module m: o and the final state."""
    *given, state = tensors
    options = dict(scale=scale, initial_state=state, return_final_state=True)
    options |= dict(chunk_size=chunk_size) if form.endswith("chunks") else {}
    return getattr(m, rule_of(form))(*given, **options)


def definition(form, q, k, v, *gates_and_state, scale=SCALE):
    *gates, state = gates_and_state
    rule = rule_of(form)
    gates = dict(zip(TAKES[rule], gates, strict=True))
    return definitions.linear_attention(rule, q, k, v, state, scale=scale, **gates)


def same(name, ours, theirs, **tolerance):
    for what, actual, expected in zip("oS", ours, theirs, strict=True):
        check(f"{name}, {what}", actual, expected, **tolerance)


def agree(m, form, chunk_size=4, **case):
    """The form's o and final state, and all gradients, are those of the lecture's table."""
    tensors = inputs(form, **case)
    ours, truth = partial(apply, m, form, chunk_size=chunk_size), partial(definition, form)
    same(f"{form} = its matrices", ours(*tensors), truth(*tensors))
    check_gradients(f"{form} = its matrices", ours, truth, tensors, atol=1e-10)


def updates(m, form, **case):
    """The form's states before and after every token, in one batch: S, k, v, beta, S'."""
    *given, first = inputs(form, **case)
    k, v, beta = given[1], given[2], given[-1]
    states = [apply(m, form, *(t[:, :i] for t in given), first)[1] for i in range(k.shape[1] + 1)]
    states = torch.stack(states, dim=1)
    return states[:, :-1], k, v, beta, states[:, 1:]


def is_the_least_change_for_the_pair(m, form):
    """S_t = argmin ‖S - S_{t-1}‖² + β ‖S k - v‖², by least squares."""
    before, k, v, beta, after = updates(m, form, beta=(0.1, 20.0), keys=None)
    root = beta.sqrt()[..., None]
    identity = torch.eye(k.shape[-1], dtype=k.dtype).expand(*k.shape[:3], -1, -1)
    system = torch.cat([identity, (root * k)[..., None, :]], dim=-2)
    target = torch.cat([before.mT, (root * v)[..., None, :]], dim=-2)
    check("S_t = argmin", after, torch.linalg.lstsq(system, target).solution.mT)


def is_one_gradient_step(m, form):
    """S_t = S_{t-1} - β ∇ ½‖S k - v‖², the gradient taken at S_{t-1}."""
    before, k, v, beta, after = updates(m, form)
    S = before.clone().requires_grad_()
    loss = (torch.einsum("blhpn,blhn->blhp", S, k) - v).square().sum() / 2
    (slope,) = torch.autograd.grad(loss, S)
    check("S_t = one gradient step", after, before - beta[..., None, None] * slope)


def recalls_what_it_was_told(m, form):
    """With orthonormal keys and β = 1 every value is read again, the last one under each key."""
    q, k, v, beta, state = inputs(form, l=4, n=4, beta=(1.0, 1.0))
    k, S = torch.linalg.qr(k.transpose(1, 2)).Q.transpose(1, 2), 0 * state
    for values in (v, v.flip(1)):
        S = apply(m, form, q, k, values, beta, S)[1]
        check("S k = the last v", torch.einsum("bhpn,blhn->blhp", S, k), values)


def does_not_grow(m, form):
    """Without new values the state never grows: β ‖k‖² ≤ 2 for the delta rule, any for Longhorn."""
    anything = dict(keys=None, beta=(0.0, 50.0))
    case = anything if rule_of(form) == "longhorn" else dict(keys=(1.0, 1.0), beta=(0.0, 2.0))
    q, k, v, beta, first = inputs(form, l=20, **case)
    given = (q, k, 0 * v, beta)
    states = [apply(m, form, *(t[:, :i] for t in given), first)[1] for i in range(21)]
    sizes = torch.stack([S.flatten(2).norm(dim=-1) for S in states])
    assert (sizes.diff(dim=0) <= 1e-12).all() and (sizes[-1] < 0.9 * sizes[0]).all()


def keeps_its_digits(m, form):
    """float32 stays exact to rounding where a chunk mixes decays that differ by ten orders."""
    tensors = inputs(form, b=1, l=64, h=2, n=8, g=(1e-6, 1e4), dtype=torch.float32)
    truth = apply(la, rule_of(form), *(t.double() for t in tensors))
    got = (t.double() for t in apply(m, form, *tensors, chunk_size=64))
    same(f"{form} with mixed decays", got, truth, tol=2e-6)


def summed(m, form, size=4):
    """All that a form gives for so many times `size` tokens, in chunks of `size`, added up."""

    def run(chunks):
        tensors = [t.requires_grad_() for t in inputs(form, l=size * chunks)]
        o, S = apply(m, form, *tensors, chunk_size=size)
        return o.sum() + S.sum()

    return run


# --- the module has them ----------------------------------------------------------------------


@pytest.mark.parametrize("end", ENDS)
def test_digits_and_options_that_the_table_does_not_ask_for(end):
    """No options; gates in sixteen bits; long chunks with decays of every size side by side."""
    for form in (rule + end for rule in TAKES):
        *given, state = inputs(form)
        options = dict(chunk_size=4) if end else {}
        got = getattr(la, rule_of(form))(*given, **options)
        check("no state, scale 1", got, definition(form, *given, 0 * state, scale=1.0)[0])
        *narrow, state = inputs(form, b=1, l=20, h=2, n=8, dtype=torch.float16)
        narrow = [t.half() for t in narrow]
        o, S = definition(form, *(t.double() for t in (*narrow, state)))
        same(f"{form} = float64 matrices", apply(la, form, *narrow, state), (o.half(), S.float()))
        keeps_its_digits(la, form)


@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    b=st.integers(1, 2),
    l=st.integers(1, 14),
    h=st.integers(1, 3),
    n=st.integers(1, 4),
    p=st.integers(1, 4),
    chunk_size=st.integers(1, 16),
    g=st.sampled_from([(1e-3, 1e-1), (0.1, 1.0), (1.0, 100.0)]),
    beta=st.sampled_from([(0.0, 0.0), (0.0, 1.0), (0.0, 1.6)]),
    seed=st.integers(0, 99),
)
def test_forms_agree_with_the_table_on_any_sizes(**case):
    for rule in TAKES:
        agree(la, f"{rule} in chunks", **case)


@pytest.mark.parametrize("end", ENDS)
def test_rules_do_what_they_are_derived_from(end):
    is_the_least_change_for_the_pair(la, "longhorn" + end)
    is_one_gradient_step(la, "delta_rule" + end)
    recalls_what_it_was_told(la, "delta_rule" + end)
    for rule in ("delta_rule", "longhorn"):
        does_not_grow(la, rule + end)


@pytest.mark.parametrize("end", ENDS)
def test_rules_are_special_cases_of_one_another_and_of_ssd(end):
    q, k, v, g, beta, state = inputs("gated_delta_rule")
    epsilon = beta / (1 + beta * k.square().sum(-1))

    def run(rule, *gates, v=v):
        return apply(la, rule + end, q, k, v, *gates, state, scale=1.0)

    def ssd(dt, A):
        return ssd_recurrent(v, dt, A, k, q, initial_state=state, return_final_state=True)

    plain, gated = run("linear_attention"), "gated_linear_attention"
    same("Mamba-2, g = 0", run(gated, 0 * g), plain)
    same("Gated DeltaNet, g = 0", run("gated_delta_rule", 0 * g, beta), run("delta_rule", beta))
    same("DeltaNet, β = ε", run("delta_rule", epsilon), run("longhorn", beta))
    dt, A = -g, -torch.tensor([0.1, 1.0, 16.0], dtype=g.dtype)
    same("linear attention = SSD, A = 0, dt = 1", plain, ssd(torch.ones_like(dt), 0 * A))
    same("g = dt A, v = dt x", run(gated, dt * A, v=dt[..., None] * v), ssd(dt, A))


def test_raw_keys_blow_the_delta_rule_up_and_unit_keys_and_longhorn_do_not():
    for rule, keys, blows_up in (
        ("delta_rule", (1.0, 1.0), False),
        ("delta_rule", None, True),
        ("longhorn", None, False),
    ):
        *given, state = inputs(rule, b=1, l=200, h=1, n=16, p=16, keys=keys, beta=(1.0, 1.0))
        size = apply(la, rule, *given, 0 * state)[1].norm()
        assert size > 1e20 if blows_up else size < 100


@pytest.mark.parametrize("end", ENDS)
def test_work_is_linear_in_the_number_of_chunks(end):
    """Also in that of blocks; and a chunk takes far fewer operations than its tokens one by one."""
    for rule in TAKES:
        run = summed(la, rule + end)
        works_linearly(run, (2, 3, 4))
        if end:
            works_linearly(lambda blocks, run=run: run(la.CHUNKS_PER_BLOCK * blocks), (1, 2, 3))
            chunks, tokens = (summed(la, form, size=16) for form in (rule + end, rule))
            assert work(chunks, 4).operations < work(tokens, 4).operations / 3


def test_table_of_rules_is_complete():
    assert {rule.function.__name__: rule.takes for rule in la.RULES.values()} == TAKES


@pytest.mark.usefixtures("unchecked")
def test_rule_compiles_to_one_graph(monkeypatch):
    copy = plant(la)  # in the module itself the import hook decorates inner functions at every call
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    form, tensors = "gated_delta_rule in chunks", inputs("gated_delta_rule")
    compiled = torch.compile(partial(apply, copy, form), backend="eager", fullgraph=True)
    same("compiled = eager", compiled(*tensors), apply(la, form, *tensors))


# --- flash-linear-attention -------------------------------------------------------------------

# One kernel for each rule.
FLA_KERNELS = {
    "linear_attention": "fused_recurrent_linear_attn",
    "gated_linear_attention": "chunk_simple_gla",
    "delta_rule": "fused_recurrent_delta_rule",
    "gated_delta_rule": "chunk_gated_delta_rule",
}


def of_fla(function, rule, q, k, v, *gates_and_state):
    """fla's scale is 1/√n if none is given, and its state is the transpose of ours."""
    *gates, S = gates_and_state
    options = dict(scale=1.0, initial_state=S.mT.contiguous(), output_final_state=True)
    o, S = function(q, k, v, **dict(zip(TAKES[rule], gates, strict=True)), **options)
    return o, S.mT


class Int(int):
    """What a loop variable of a kernel is to the interpreter's kernels: a number with a `to`."""

    def to(self, dtype):
        return self


@pytest.fixture
def fla_ops(monkeypatch):
    """fla's kernels, made to run in the interpreter: no block sizes to time, loops that count."""
    if kernel_status().mode != "interpreter":
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
def test_kernels_of_fla_agree_in_the_interpreter(fla_ops):
    """Two chunks of theirs, or a few tokens one by one."""
    for rule, name in FLA_KERNELS.items():
        theirs = partial(of_fla, getattr(fla_ops, name), rule)
        ours = partial(apply, la, f"{rule} in chunks", chunk_size=64, scale=1.0)
        sizes = dict(b=1, l=70, h=1) if name.startswith("chunk") else dict(b=2, l=5, h=2)
        tensors = inputs(rule, n=16, p=32, dtype=torch.float32, **sizes)
        same(f"fla's {name} = {rule}", theirs(*tensors), ours(*tensors), tol=5e-6)
        check_gradients(f"fla's {name} = {rule}", theirs, ours, tensors, tol=5e-6)


# --- what hides a mistake ------------------------------------------------------------------------


def test_undecayed_system_hides_where_nothing_decays_and_exponents_where_little_does():
    from planted.linear_attention import DECAY, MASK_AFTER_EXP, RUNNING_SUMS, UNDECAYED

    agree(plant(la, UNDECAYED), "delta_rule in chunks")
    for edit in ((DECAY, RUNNING_SUMS), (DECAY, MASK_AFTER_EXP)):
        agree(plant(la, edit), "gated_delta_rule in chunks")


# --- bad input: what a signature does not say ---------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("end", ENDS)
def test_a_gate_of_none_is_refused(end):
    """It would be another rule: the delta rule without β adds, as linear attention does."""
    for rule, gates in TAKES.items():
        *given, state = inputs(rule)
        for i, name in enumerate(gates, start=3):
            tensors = [*given[:i], None, *given[i + 1 :]]
            with pytest.raises(TypeError, match=f"^{name} must be a tensor, got None"):
                apply(la, rule + end, *tensors, state)
