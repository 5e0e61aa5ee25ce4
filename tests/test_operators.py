"""One table of functions, one list of properties: every form of every operator, side by side.

A row says how its inputs are drawn, what the function gives for them, and what defines it
(definitions.py). Forms that can stand in for one another share inputs and definition. Causality,
independence of rows and calls joined by a state are asked by `cheems_ref.verify`, to which the
inputs of a token, laid end to end, are one x.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import definitions
import pytest
import torch
from properties import leaves_alone, normal

from cheems_ref import (
    attention,
    convolution,
    kernels,
    linear_attention,
    mamba,
    retrieval,
    rope,
    ssd,
    state_space,
    verify,
)
from cheems_ref.verify import check, check_gradients

STATUS = kernels.kernel_status()


@dataclass(frozen=True)
class Operator:
    """One row: function(**inputs) and definition(**inputs) are both (y, state), or y alone."""

    function: Callable
    definition: Callable
    draw: Callable  # (b, l) -> inputs by name, those of a token first
    by_token: tuple[str, ...]  # inputs with an axis of tokens
    state: str = ""  # the input through which calls join up
    chunk_size: int = 4
    borders: tuple[int, ...] = (1, 3, 4, 5, 8, 13)
    dtype: torch.dtype = torch.float64
    cases: dict = field(default_factory=dict)  # further inputs by name: changes of those drawn

    def inputs(self, b=2, length=13, case=None):
        drawn = self.draw(b, length)
        drawn |= {name: f(drawn[name]) for name, f in self.cases.get(case, {}).items()}
        narrow = {torch.float64: self.dtype}
        return {name: t.to(narrow.get(t.dtype, t.dtype)) for name, t in drawn.items()}

    def __call__(self, x, cache=None, like=None):
        """y and the state for tokens whose inputs x holds end to end."""
        sizes = [math.prod(like[name].shape[2:]) for name in self.by_token]
        given = {
            name: t.view(*x.shape[:2], *like[name].shape[2:])
            for name, t in zip(self.by_token, x.split(sizes, dim=-1), strict=True)
        }
        rest = {name: t for name, t in like.items() if name not in (*self.by_token, self.state)}
        start = like.get(self.state)
        if start is not None:  # any row may come alone
            rest[self.state] = (
                start[:1].expand(len(x), *start.shape[1:]) if cache is None else cache
            )
        result = self.function(**given, **rest)
        y, state = result if isinstance(result, tuple) else (result, None)
        return y.reshape(*y.shape[:2], -1), state

    def joined(self, b, length):
        """x, and how to call the operator with it."""
        like = self.inputs(b, length)
        x = torch.cat([like[name].reshape(b, length, -1) for name in self.by_token], dim=-1)
        return x, lambda op, x, ids, real, cache: op(x, cache, like)


def positive(*shape, seed):
    return torch.exp(normal(*shape, seed=seed) - 1)


# --- SSD: h = 4 heads in g = 2 groups, p = 3, n = 2 ---------------------------------------------


def of_ssd(b, length, h=4):
    return dict(
        x=normal(b, length, h, 3, seed=1),
        dt=positive(b, length, h, seed=2),
        B=normal(b, length, 2, 2, seed=3),
        C=normal(b, length, 2, 2, seed=4),
        A=-positive(h, seed=5),
        D=normal(h, seed=6),
        state=normal(b, h, 3, 2, seed=7),
    )


def form_of_ssd(form, state, **inputs):
    options = dict(chunk_size=4, initial_state=state, return_final_state=True)
    if form == "ssd":
        return ssd.ssd(**inputs, **options, backend="auto")
    return getattr(ssd, f"ssd_{form}")(**inputs, **options)


def steps_of_ssd(x, dt, A, B, C, D, state):
    if x.shape[1] == 0:
        return x.clone(), state.clone()
    y = []
    for x_t, dt_t, B_t, C_t in zip(*(t.unbind(1) for t in (x, dt, B, C)), strict=True):
        y_t, state = ssd.ssd_step(x_t, dt_t, A, B_t, C_t, state, D=D)
        y.append(y_t)
    return torch.stack(y, dim=1), state


def matrix_of_ssd(x, dt, A, B, C):
    return torch.einsum("bhts,bshp->bthp", ssd.semiseparable_matrix(dt, A, B, C), x)


def defined_by_matrix(x, dt, A, B, C):
    (_, _, h, p), n = x.shape, B.shape[-1]
    zero = x.new_zeros(len(x), h, p, n)
    return definitions.ssd(x, dt, A, B, C, x.new_zeros(h), zero)[0]


def without(draw, *names):
    return lambda b, length: {k: t for k, t in draw(b, length).items() if k not in names}


def at(tokens, value):
    """A change of an input at some of its tokens."""
    return lambda t: t.index_fill(1, torch.tensor(tokens), value)


DT = {
    "dt = 0 at some tokens": dict(dt=at([0, 3, 4, 5, 12], 0.0)),
    "dt = 0": dict(dt=torch.zeros_like),
    "small dt": dict(dt=lambda t: t * 1e-3),
    "large dt": dict(dt=lambda t: t * 100),
    "A = 0": dict(A=torch.zeros_like),
}
SSD_CASES = DT | {"two resets": dict(dt=at([3, 8], 1e20), x=at([3, 8], 1e-20))}
of_token = ("x", "dt", "B", "C")
row = partial(Operator, definition=definitions.ssd, draw=of_ssd, by_token=of_token, state="state")
OPERATORS = {
    f"ssd_{form}": row(partial(form_of_ssd, form), cases=SSD_CASES)
    for form in ("recurrent", "quadratic", "chunked")
}
OPERATORS["ssd"] = row(partial(form_of_ssd, "ssd"))
OPERATORS["ssd_step"] = row(steps_of_ssd, cases=SSD_CASES)
OPERATORS["ssd, three heads to a group"] = row(
    partial(form_of_ssd, "chunked"), draw=partial(of_ssd, h=6)
)
OPERATORS["semiseparable_matrix"] = Operator(
    matrix_of_ssd, defined_by_matrix, without(of_ssd, "D", "state"), of_token, cases=DT
)
if STATUS.mode == "interpreter":
    OPERATORS["ssd_kernel"] = row(
        partial(form_of_ssd, "kernel"),
        draw=partial(of_ssd, h=2),
        dtype=torch.float32,
        borders=(5,),
    )

# --- linear attention: h = 3 heads, n = 3, p = 4 --------------------------------------------------


def of_linear_attention(b, length, gates=()):
    k = normal(b, length, 3, 3, seed=2)
    gate = dict(g=-positive(b, length, 3, seed=4), beta=positive(b, length, 3, seed=5))
    return dict(
        q=normal(b, length, 3, 3, seed=1),
        k=k / k.norm(dim=-1, keepdim=True).clamp(min=1e-3),
        v=normal(b, length, 3, 4, seed=3),
        state=normal(b, 3, 4, 3, seed=6),
        **{name: gate[name] for name in gates},
    )


def form_of_rule(function, state, **inputs):
    return function(**inputs, scale=0.7, initial_state=state, return_final_state=True)


GATES = {
    "linear_attention": (),
    "gated_linear_attention": ("g",),
    "longhorn": ("beta",),
    "delta_rule": ("beta",),
    "gated_delta_rule": ("g", "beta"),
}
GATE_CASES = {
    "g": {
        "g = 0": dict(g=torch.zeros_like),
        "resets": dict(g=at([1, 4, 7, 10], -math.inf)),
        "strong decay": dict(g=lambda t: 30 * t),
    },
    "beta": {
        "beta = 0 at some tokens": dict(beta=at([0, 3, 4, 5, 12], 0.0)),
        "beta = 2": dict(beta=lambda t: torch.full_like(t, 2.0)),
    },
}
for rule, gates in GATES.items():
    function, cases = getattr(linear_attention, rule), {}
    for gate in gates:
        cases |= GATE_CASES[gate]
    row = partial(
        Operator,
        definition=partial(definitions.linear_attention, rule, scale=0.7),
        draw=partial(of_linear_attention, gates=gates),
        by_token=("q", "k", "v", *gates),
        state="state",
        cases=cases,
    )
    OPERATORS[rule] = row(partial(form_of_rule, function))
    OPERATORS[f"{rule} in chunks"] = row(partial(form_of_rule, partial(function, chunk_size=4)))

# --- Mamba-1: d = 3 channels, n = 2 ---------------------------------------------------------------


def of_scan(b, length):
    drawn = of_ssd(b, length)
    return dict(
        x=normal(b, length, 3, seed=1),
        dt=drawn["dt"][..., :3],
        B=drawn["B"][:, :, 0],
        C=drawn["C"][:, :, 0],
        A=-positive(3, 2, seed=5),
        D=normal(3, seed=6),
        state=normal(b, 3, 2, seed=7),
    )


def form_of_scan(function, state, **inputs):
    return function(**inputs, initial_state=state, return_final_state=True)


for name in ("selective_scan", "selective_scan_parallel"):
    OPERATORS[name] = Operator(
        partial(form_of_scan, getattr(mamba, name)),
        definitions.selective_scan,
        of_scan,
        of_token,
        "state",
        borders=(1, 2, 3, 4, 5, 7, 8, 9, 16, 17),
        cases=DT,
    )

# --- time-invariant models: n = 3 -----------------------------------------------------------------


def of_system(b, length):
    A = torch.tensor([[0.5, -0.3, 0.1], [0.2, 0.4, 0.0], [-0.1, 0.3, 0.6]], dtype=torch.float64)
    x = normal(b, length, seed=1)
    return dict(x=x, A=A, B=normal(3, seed=2), C=normal(3, seed=3), state=normal(b, 3, seed=4))


def defined_system(x, A, B, C, state):
    y = []
    for t in range(x.shape[1]):
        state = torch.stack([A @ h + B * x[i, t] for i, h in enumerate(state)])
        y.append(state @ C)
    return torch.stack(y, dim=1) if y else x, state


def recurrent_system(x, A, B, C, state):
    return state_space.ssm_recurrent(A, B, C, x, initial_state=state, return_final_state=True)


def convolved_system(x, A, B, C):
    return state_space.ssm_convolution(state_space.ssm_kernel(A, B, C, x.shape[1]), x)


OPERATORS["ssm_recurrent"] = Operator(
    recurrent_system, defined_system, of_system, ("x",), "state", borders=(1, 2, 5)
)
OPERATORS["ssm_convolution of ssm_kernel"] = Operator(
    convolved_system,
    lambda x, A, B, C: defined_system(x, A, B, C, x.new_zeros(len(x), 3))[0],
    without(of_system, "state"),
    ("x",),
    borders=(2, 3, 4, 5, 9),  # with one token, A has no effect
)

# --- convolution, rotation ------------------------------------------------------------------------


def of_convolution(b, length, taps=4):
    drawn = dict(u=normal(b, length, 3, seed=1), weight=normal(3, taps, seed=2))
    return drawn | dict(history=normal(b, taps - 1, 3, seed=3))


for taps in (1, 2, 4):
    OPERATORS[f"short_convolution, {taps} taps"] = Operator(
        convolution.short_convolution,
        definitions.convolution,
        partial(of_convolution, taps=taps),
        ("u",),
        "history",
    )


def of_rotation(b, length):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1000, (b, length), generator=generator)
    return dict(x=normal(b, length, 3, 6, seed=1), position_ids=ids.double())


def rotate(x, position_ids):
    cos, sin = rope.rope_cos_sin(position_ids.detach().long(), 6, 500.0, dtype=x.dtype)
    return rope.apply_rope(x, cos, sin)


def defined_rotation(x, position_ids):
    return definitions.rotated(x, position_ids.detach(), 500.0)


def rotate_by_matrices(x, position_ids):
    matrices = [rope.rotation_matrix(float(t), 6, 500.0) for t in position_ids.flatten()]
    if not matrices:
        return x
    matrices = torch.stack(matrices).view(*position_ids.shape, 6, 6)
    return torch.einsum("blij,blhj->blhi", matrices, x)


OPERATORS["apply_rope"] = Operator(rotate, defined_rotation, of_rotation, ("x", "position_ids"))
OPERATORS["rotation_matrix"] = Operator(
    rotate_by_matrices, defined_rotation, of_rotation, ("x", "position_ids")
)

# --- attention: h = 4, p = 6, values in other groups than keys -----------------------------------


def of_attention(b, length, groups=(4, 4), biased=False, mask=None):
    drawn = dict(
        q=normal(b, length, 4, 6, seed=1),
        k=normal(b, length, groups[0], 6, seed=2),
        v=normal(b, length, groups[1], 6, seed=3),
    )
    hidden = {"b 1 t s": 1, "b h t s": 4}.get(mask)
    drawn |= dict(hide=normal(b, length, hidden, seed=4)) if hidden else {}
    return drawn | (dict(bias=normal(b, length, 4, seed=5)) if biased else {})


def with_mask(function, mask, q, k, v, hide=None, bias=None):
    """What `hide` says, or a fixed pattern; every query sees its own token."""
    n = q.shape[1]
    allowed = definitions.causal(n, n)
    if hide is not None:
        allowed = allowed & (hide.transpose(1, 2)[:, :, None] < 0.5) | torch.eye(n).bool()
    elif mask == "t s":
        allowed &= (normal(20, 20, seed=9)[:n, :n] < 0.5) | torch.eye(n).bool()
    bias = None if bias is None else bias.transpose(1, 2)
    if function is attention.attention and mask is None:
        allowed = None
    return function(q, k, v, allowed=allowed, bias=bias)


for groups, (biased, mask) in {
    (4, 4): (False, None),
    (2, 2): (True, None),
    (1, 4): (False, "t s"),
    (2, 1): (True, "b 1 t s"),
    (1, 1): (False, "b h t s"),
    (4, 2): (True, "t s"),
}.items():
    options = dict(groups=groups, biased=biased, mask=mask)
    drawn = of_attention(1, 1, **options)
    for function in (attention.attention, attention.naive_attention):
        OPERATORS[f"{function.__name__}, {groups}, {mask}{', biased' * biased}"] = Operator(
            partial(with_mask, function, mask),
            partial(with_mask, definitions.attention, mask),
            partial(of_attention, **options),
            tuple(drawn),
            borders=(1, 2, 5),
        )

# --- retrieved experts: h = 2, k = 3 of e = 7, some chosen twice ---------------------------------


def of_retrieval(b, length, gated=False):
    generator = torch.Generator().manual_seed(5)
    drawn = dict(
        x=normal(b, length, 4, seed=1),
        gates=normal(b, length, 2, 3, seed=2),
        indices=torch.randint(7, (b, length, 2, 3), generator=generator).double(),
        down=normal(7, 4, seed=3),
        up=normal(7, 5, seed=4),
    )
    return drawn | (dict(gate=normal(7, 4, seed=6)) if gated else {})


def with_indices(function, indices, **inputs):
    return function(**inputs, indices=indices.detach().long())


for form in ("retrieved_experts", "naive_retrieved_experts"):
    for gated in (False, True):
        OPERATORS[f"{form}{', gated' * gated}"] = Operator(
            partial(with_indices, getattr(retrieval, form)),
            partial(with_indices, definitions.retrieved_experts),
            partial(of_retrieval, gated=gated),
            ("x", "gates", "indices"),
            borders=(1, 2, 5),
        )

LINEAR_IN_TIME = [name for name, op in OPERATORS.items() if op.state]
QUICK = [name for name in OPERATORS if name != "ssd_kernel"]  # which the interpreter is not
NO_GRADIENT = ("position_ids", "indices", "hide")


# --- the properties ------------------------------------------------------------------------------


def each(names):
    return pytest.mark.parametrize("name", names)


def results(result):
    return result if isinstance(result, tuple) else (result,)


def agree(op, inputs):
    """Values, and gradients with respect to every input through every result."""
    got, want = results(op.function(**inputs)), results(op.definition(**inputs))
    for a, e in zip(got, want, strict=True):
        check("form = definition", a, e, atol=1e-10)
    if got[0].numel():
        names = [name for name, t in inputs.items() if name not in NO_GRADIENT and t.numel()]
        fixed = {name: t for name, t in inputs.items() if name not in names}
        forms = (
            lambda *tensors, f=f: f(**dict(zip(names, tensors, strict=True)), **fixed)
            for f in (op.function, op.definition)
        )
        tensors = [inputs[name] for name in names]
        # Steps so large that all is forgotten leave the gradient of a rate to rounding.
        atol = 1e-10 if op.dtype == torch.float64 else 1e-4
        check_gradients("form = definition", *forms, tensors, atol=atol)


@pytest.mark.parametrize(
    ("name", "length"), [(name, n) for name, op in OPERATORS.items() for n in (0, *op.borders)]
)
def test_values_and_gradients_are_those_of_the_definition(name, length):
    agree(OPERATORS[name], OPERATORS[name].inputs(2, length))


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, op in OPERATORS.items() for case in op.cases]
)
def test_extreme_inputs_have_the_values_and_gradients_of_the_definition(name, case):
    agree(OPERATORS[name], OPERATORS[name].inputs(case=case))


@each(["ssd_chunked", "gated_delta_rule in chunks"])
def test_blocks_of_chunks_join_up(name):
    """One token more than two blocks of them."""
    op = OPERATORS[name]
    chunks = max(ssd.CHUNKS_PER_BLOCK, linear_attention.CHUNKS_PER_BLOCK)
    agree(op, op.inputs(1, 2 * op.chunk_size * chunks + 1))


@each(QUICK)
def test_is_causal(name):
    x, call = OPERATORS[name].joined(2, 13)
    verify.is_causal(OPERATORS[name], x, call=call)


@each(QUICK)
def test_rows_are_independent(name):
    x, call = OPERATORS[name].joined(2, 6)
    verify.rows_are_independent(OPERATORS[name], x, call=call)


@each([name for name in LINEAR_IN_TIME if name in QUICK])
def test_pieces_equal_one_pass(name):
    op = OPERATORS[name]
    x, call = op.joined(2, 13)
    verify.pieces_equal_one_pass(op, x, call=call)


@each(QUICK)
def test_inputs_are_left_alone_and_results_share_no_memory_with_them(name):
    op = OPERATORS[name]
    for length in (0, 5):
        inputs = op.inputs(2, length)
        leaves_alone(lambda *t, op=op, inputs=inputs: op.function(**inputs), *inputs.values())
        copies = {key: t.clone() for key, t in inputs.items()}
        for t in results(op.function(**inputs)):
            t.add_(1)
        for key, t in copies.items():
            assert torch.equal(inputs[key], t), f"{key} shares its memory with a result"


@each([name for name in LINEAR_IN_TIME if name not in ("ssd_kernel", "ssm_recurrent")])
def test_sixteen_bits_are_computed_in_float32_and_rounded_once(name):
    op = OPERATORS[name]
    for wide in (("A", "dt", "D", "g", "beta", "state"), ("state",)):
        inputs = {
            key: t.float() if key in wide else t.bfloat16() for key, t in op.inputs(2, 20).items()
        }
        y, state = op.function(**inputs)
        want, final = op.definition(**{key: t.double() for key, t in inputs.items()})
        assert y.dtype == torch.bfloat16 and state.dtype == inputs[op.state].dtype
        half = torch.finfo(torch.bfloat16).eps / 2
        assert ((y.double() - want).abs() <= 1.02 * half * want.abs() + 1e-4).all()
        check("final state", state, final.to(state.dtype), tol=1e-5)
