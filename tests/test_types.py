"""Editors read our signatures: pyright accepts every right call and reports every wrong one.

A signature that is only made at run time would pass `inspect.signature` and fail here.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright")

ROOT = Path(__file__).parents[1]
MODULES = ("ssd", "linear_attention", "mamba", "attention", "state_space")

# Every public function of these modules, called as the chapters call it.
RIGHT = """\
import torch
from cheems_ref import attention, mamba, plotting, ssd, state_space
from cheems_ref.linear_attention import RULES, delta_rule, gated_delta_rule
from cheems_ref.linear_attention import gated_linear_attention, linear_attention, longhorn
from cheems_ref.verify import check

x, dt, A, D = torch.rand(2, 32, 4, 8), torch.rand(2, 32, 4), -torch.rand(4), torch.ones(4)
B = C = torch.randn(2, 32, 2, 16)
y, state = ssd.ssd_recurrent(x, dt, A, B, C, D=D, return_final_state=True)
print(y.shape, ssd.ssd_chunked(x, dt, A, B, C, initial_state=state).shape)
check("the forms agree", ssd.ssd_chunked(x, dt, A, B, C, D=D, chunk_size=8), y)
both = ssd.ssd_quadratic(x, dt, A, B, C) + ssd.ssd_kernel(x, dt, A, B, C)
M = ssd.semiseparable_matrix(dt, A, B, C).abs().max()
y, state = ssd.ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state, backend="recurrent")
y = 2 * ssd.ssd(x, dt, A, B, C, backend="chunked") + ssd.ssd_recurrent(x, dt, A, B, C)
grouped = ssd.expand_groups(B, 4).shape
y, cache = ssd.SSD(32, n_heads=4, position="rope")(x.flatten(2), torch.arange(32).expand(2, -1))

q, k, v, g, beta = x, x, x, -dt, dt
o, S = gated_delta_rule(q, k, v, g, beta, chunk_size=8, return_final_state=True)
o = linear_attention(q, k, v, scale=0.5) - gated_linear_attention(q, k, v, g, initial_state=S)
o = (longhorn(q, k, v, beta) - delta_rule(q, k, v, beta=beta, chunk_size=8)).square().mean()
o = RULES["DeltaNet"].function(q, k, v, beta).shape

u, rates, b = x[:, :, 0], -torch.rand(8, 16), B[:, :, 0]
y, h = mamba.selective_scan(u, u.exp(), rates, b, b, D=torch.ones(8), return_final_state=True)
check("scans", mamba.selective_scan_parallel(u, u.exp(), rates, b, b, D=torch.ones(8)), y)
y, memory = mamba.Mamba(8, d_state=4)(u, cache=None)

A_legs, B_legs = state_space.hippo_legs(4)
A_bar, B_bar = state_space.discretize_bilinear(A_legs, B_legs, dt=0.1)
A_bar, B_bar = state_space.discretize_zoh(A_legs, B_legs, 0.1)
signal, kernel = u[:, :, 0].double(), state_space.ssm_kernel(A_bar, B_bar, B_legs, 32)
y, h = state_space.ssm_recurrent(A_bar, B_bar, B_legs, signal, return_final_state=True)
check("convolution", state_space.ssm_convolution(kernel, signal), y)
y = state_space.ssm_recurrent(A_bar, B_bar, B_legs, signal).abs().max() + state_space.S4D(8)(u)

positions = torch.arange(32).expand(2, -1)
allowed = attention.causal_mask(32, 32, real=dt[..., 0] >= 0)
y = attention.attention(q, k[:, :, :2], v[:, :, :2], allowed=allowed).flatten(2)
y = attention.attention(q, k, v) - attention.naive_attention(q, k, v, allowed=allowed)
y, cache = attention.QCAttn(32, n_heads=4, mask="content")(y.flatten(2), positions)
y, cache = attention.InnerFuncAttn(32, n_heads=4, inner="ssd")(y, positions, cache=None)
bias = attention.ContentMask(32, 4)(v, positions) + attention.GateMask(4, 32)(v, positions)
y = attention.RetrievedValues(32, n_heads=4, n_values=9, k_values=2).weights(y).shape
part = attention.online_softmax(torch.rand(2, 4, 32, 32), v)
y = attention.join_softmax(part, part).weighted / part.total

fig, ax = plotting.figure()
plotting.lines(ax, range(32), {"o": S.flatten()[:32]})
fig, (left, right) = plotting.figure(columns=2)
left.set_title("values")
"""
# Each of these lines, after the right ones, is an error.
WRONG = """\
ssd.ssd_chunked(x, dt, A, B)
ssd.ssd_chunked(x, dt, A, B, C, chunks=4)
ssd.ssd_recurrent(x, dt, A, B, C, state)
ssd.ssd_kernel(x, dt, A, B, C, chunk_size="64")
delta_rule(q, k, v, chunk_size=4)
gated_delta_rule(q, k, v, beta=beta)
linear_attention(q, k, v, beta)
mamba.selective_scan(u, u, rates, b, b, state=h)
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[tuple[int, str]]:
    """The lines of RIGHT + WRONG that pyright reports, counted from 1, and its messages."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "program.py").write_text(RIGHT + WRONG, encoding="utf-8")
    settings = dict(typeCheckingMode="standard", extraPaths=[str(ROOT)], include=["program.py"])
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert finished.returncode in (0, 1), finished.stderr
    found = json.loads(finished.stdout)["generalDiagnostics"]
    return [(one["range"]["start"]["line"] + 1, one["message"]) for one in found]


def test_right_calls_run():
    """Without the kernels, which take long in an interpreter."""
    exec(RIGHT.replace("ssd.ssd_kernel(x, dt, A, B, C)", "x"), {})


def test_right_calls_have_no_error(errors):
    assert [error for error in errors if error[0] <= RIGHT.count("\n")] == []


def test_every_wrong_call_has_one(errors):
    first = RIGHT.count("\n") + 1
    reported = {line for line, _ in errors if line >= first}
    assert reported == {*range(first, first + WRONG.count("\n"))}


@pytest.mark.parametrize("module", MODULES)
def test_no_public_function_is_missing_above(module):
    tree = ast.parse((ROOT / "cheems_ref" / f"{module}.py").read_text(encoding="utf-8"))
    public = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
        if "NamedTuple" not in map(ast.unparse, getattr(node, "bases", ()))  # results, not calls
    }
    called = {node.id for node in ast.walk(ast.parse(RIGHT)) if isinstance(node, ast.Name)}
    called |= {node.attr for node in ast.walk(ast.parse(RIGHT)) if isinstance(node, ast.Attribute)}
    assert public <= called
