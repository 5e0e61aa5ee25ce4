"""The kernels against a float64 recurrence that shares nothing with them.

On a machine without a GPU this runs mamba-ssm's kernels in Triton's interpreter; with one, on it.
Relative error is max|error| / max|truth|, per tensor.
"""

import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import types
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import definitions
import pytest
import torch
from properties import normal

from cheems_ref import kernels
from cheems_ref.kernels import chunk_scan, kernel_status, state_update
from cheems_ref.ssd import ssd_recurrent
from cheems_ref.verify import check
from experiments.runner import from_notebook

ROOT = Path(kernels.__file__).parents[1]
NAMES = ("x", "dt", "A", "B", "C", "D", "initial_state")
STATUS = kernel_status()
DEVICE = "cuda" if STATUS.mode == "cuda" else "cpu"
needs_kernel = pytest.mark.skipif(not STATUS.available, reason=STATUS.reason)
interpreted = pytest.mark.skipif(STATUS.mode != "interpreter", reason="only in the interpreter")
# Tolerances from one rounding of each type; float32 and float16 are promised.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def recurrence(x, dt, A, B, C, D=None, initial_state=None):
    (b, _, h, p), n = x.shape, B.shape[-1]
    D = x.new_zeros(h) if D is None else D
    state = x.new_zeros(b, h, p, n) if initial_state is None else initial_state
    return definitions.ssd(x, dt, A, B, C, D, state)


def draw(shape, dtype=torch.float32, seed=0):
    b, length, h, p, g, n = shape
    shapes = (b, length, h, p), (b, length, g, n), (b, length, g, n), (b, length, h), (h,), (h,)
    drawn = (normal(*size, seed=10 * seed + i) for i, size in enumerate((*shapes, (b, h, p, n))))
    x, B, C, dt, A, D, state = (t.to(DEVICE, torch.float32) for t in drawn)
    dt, A = torch.nn.functional.softplus(dt - 1), -torch.exp(A / 2)
    return [x.to(dtype), dt, A, B.to(dtype), C.to(dtype), D, state]


def kernel(x, dt, A, B, C, D=None, initial_state=None, chunk_size=16):
    return chunk_scan(x, dt, A, B, C, D=D, chunk_size=chunk_size, initial_state=initial_state)


def relative(value, truth):
    value, truth = value.detach().double(), truth.detach().double()
    return float((value - truth).abs().max() / truth.abs().max().clamp_min(1e-300))


def whole_numbers(shape):
    """Which every dtype can hold."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(1))


def results_and_gradients(run, inputs, through, weights):
    """y, the state, and the gradients of a weighted sum of those that it goes through."""
    pairs = zip(NAMES, inputs, strict=True)
    leaves = {name: t.detach().requires_grad_() for name, t in pairs if t is not None}
    found = dict(zip(("y", "state"), run(**leaves), strict=True))
    of_sum = [weights(found[name].shape).to(found[name]) for name in through]
    torch.autograd.backward([found[name] for name in through], of_sum)
    return found | {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}


def compare(inputs, tolerance, through=("y", "state"), weights=whole_numbers):
    """Results and every gradient of the kernel against the recurrence in float64."""
    wide = [None if t is None else t.double() for t in inputs]
    ours = results_and_gradients(kernel, inputs, through, weights)
    true = results_and_gradients(recurrence, wide, through, weights)
    assert ours["y"].dtype == inputs[0].dtype and ours["state"].dtype == torch.float32
    errors = {name: relative(ours[name], truth) for name, truth in true.items()}
    assert max(errors.values()) <= tolerance, errors
    return errors


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is released for Linux only")
def test_the_kernels_can_run_here():
    """Else every test below, and the kernel rung of notebook 03, would be skipped in silence."""
    assert STATUS.available, STATUS.reason


SHAPES = {  # b, l, h, p, g, n with chunks of 16
    "three chunks, the last one ragged": (1, 35, 1, 8, 1, 8),
    "several groups, 1 < g < h, odd widths": (1, 7, 4, 5, 2, 3),
    "one channel, one state": (1, 1, 1, 1, 1, 1),
}


@needs_kernel
def test_kernel_equals_recurrence():
    for shape in SHAPES.values():
        compare(draw(shape), TOLERANCE[torch.float32])
    inputs = draw((2, 7, 1, 8, 1, 8))
    inputs[1][:, 2:5] = 0  # as at padding
    for through in ("y", "state"):
        compare([*inputs[:5], None, None], 1e-5, through=(through,))
    inputs = draw((1, 40, 1, 8, 1, 8))
    y, state = recurrence(*(t.double() for t in inputs))
    for chunk_size in (1, 24, 100_000):
        ours = kernel(*inputs, chunk_size=chunk_size)
        assert relative(ours[0], y) < 1e-5 and relative(ours[1], state) < 1e-5, chunk_size


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_equal_the_recurrence_in_16_bits(dtype):
    errors = compare(draw((1, 18, 1, 16, 1, 16), dtype), TOLERANCE[dtype])
    assert errors["y"] > 1e-6  # it did compute with 16-bit tensors
    one_token_equals_recurrence((1, 1, 2, 8, 1, 8), TOLERANCE[dtype], dtype)


def one_token_equals_recurrence(shape, tolerance, dtype=torch.float32):
    """And leaves the state alone."""
    x, dt, A, B, C, D, state = draw(shape, dtype)
    before = state.clone()
    for skip in (D, None):
        y, new = state_update(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state, D=skip)
        inputs = (x, dt, A, B, C, skip, state)
        ys, last = recurrence(*(None if t is None else t.double() for t in inputs))
        assert y.dtype == dtype and new.dtype == torch.float32
        assert relative(y, ys[:, 0]) < tolerance and relative(new, last) < 1e-6
    assert torch.equal(state, before) and new.data_ptr() != state.data_ptr()


@needs_kernel
def test_decode_equals_recurrence_and_leaves_the_state_alone():
    for shape in ((2, 1, 6, 5, 2, 3), (1, 1, 2, 1, 1, 1)):
        one_token_equals_recurrence(shape, 1e-6)


@needs_kernel
def test_strided_and_expanded_inputs():
    x, dt, A, B, C, D, state = draw((2, 5, 2, 8, 1, 8))
    inputs = [
        x.transpose(1, 3).contiguous().transpose(1, 3),
        dt[:1].expand(2, -1, -1),
        A[:1].expand(2),
        B.mT.contiguous().mT,
        C[:, :1].expand_as(C),
        torch.stack([D, D], 1)[:, 0],
        state.mT.contiguous().mT,
    ]
    compare(inputs, 1e-5)
    # The gradient of a sum has stride 0, too.
    compare(inputs, 1e-5, weights=lambda shape: torch.ones((), device=DEVICE).expand(shape))


@needs_kernel
def test_its_graph_is_an_ordinary_one():
    """Backward runs twice where the graph is kept, and refuses inputs changed in between."""
    inputs = draw((1, 5, 2, 8, 1, 8))
    inputs[3].requires_grad_()
    y, _ = kernel(*inputs)
    (first,) = torch.autograd.grad(y.sum() + y.square().sum(), inputs[3], retain_graph=True)
    (again,) = torch.autograd.grad(y.sum() + y.square().sum(), inputs[3], retain_graph=True)
    check("the gradient once more", again, first)
    with torch.no_grad():
        inputs[3] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_kernel
def test_torch_compile_goes_around_the_kernel():
    x, *rest = draw((1, 5, 2, 8, 1, 8))[:5]
    compiled = torch.compile(lambda x: 2 * kernel(2 * x, *rest)[0], backend="eager")
    check("compiled = called", compiled(x), 2 * kernel(2 * x, *rest)[0])


@needs_kernel
def test_no_token_is_defined():
    inputs = [t.requires_grad_() for t in draw((2, 0, 2, 4, 1, 3), torch.float16)]
    y, state = kernel(*inputs)
    (y.sum() + (2 * state).sum()).backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs[:6])
    assert torch.equal(inputs[6].grad, torch.full_like(inputs[6], 2))
    assert not kernel(*(t.detach() for t in inputs[:5]))[1].any()


@needs_kernel
def test_refusals():
    inputs = draw((1, 3, 2, 4, 1, 4))
    for i, name in enumerate(NAMES):
        for change, error, message in (
            (inputs[i].double(), TypeError, rf"^{name} is torch.float64"),
            (inputs[i].to("meta"), ValueError, "meta"),
        ):
            with pytest.raises(error, match=message):
                kernel(*inputs[:i], change, *inputs[i + 1 :])
    step = [t[:, 0] if t.dim() > 2 else t for t in inputs[:5]]
    with pytest.raises(TypeError, match=r"^state is torch\.float64"):
        state_update(*step, inputs[6].double())
    with pytest.raises(ValueError, match="no backward"):
        state_update(*step, inputs[6].requires_grad_())


@pytest.mark.usefixtures("unchecked")
def test_the_compiled_kernels_are_offered_what_they_can_take(monkeypatch):
    """A simulation, so that it says on every machine what "auto" does on a GPU."""
    for on_gpu, dtype, mode, taken in (
        (True, torch.bfloat16, "cuda", True),
        (True, torch.float16, "cuda", True),
        (True, torch.float32, "cuda", False),  # in so many registers that they don't fit
        (True, torch.float64, "cuda", False),
        (True, torch.bfloat16, "interpreter", False),
        (True, torch.bfloat16, "none", False),
        (False, torch.bfloat16, "cuda", False),
    ):
        status = kernels.KernelStatus(mode != "none", mode, "")
        monkeypatch.setattr(kernels, "kernel_status", lambda status=status: status)
        assert kernels.can_take(types.SimpleNamespace(is_cuda=on_gpu, dtype=dtype)) is taken


@needs_kernel
def test_float32_is_compiled_with_tf32x3_and_in_one_configuration(monkeypatch, capsys):
    """And a line says that it takes a while. 16 bits keep every configuration."""
    kernels.print_once.cache_clear()
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    tuner = types.SimpleNamespace(configs=["large", "small"])
    loaded = types.SimpleNamespace(smallest=[(tuner, ["small"])])
    monkeypatch.setattr(kernels, "_load", lambda: loaded)
    for dtype, asked, during, configurations in (
        (torch.float32, None, "tf32x3", ["small"]),
        (torch.float32, "tf32", "tf32", ["small"]),
        (torch.bfloat16, None, "tf32x3", ["large", "small"]),
    ):
        if asked:
            monkeypatch.setenv("TRITON_F32_DEFAULT", asked)
        launching = kernels._launching("cuda", "forward", dtype)
        with pytest.raises(KeyError, match="launch"), launching:
            assert os.environ["TRITON_F32_DEFAULT"] == during
            assert tuner.configs == configurations
            raise KeyError("launch")
        assert os.environ.get("TRITON_F32_DEFAULT") == asked
        assert tuner.configs == ["large", "small"]
        monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "compiled for float32" in said[0] and "bfloat16" in said[1]


COMPILED = """
import torch
from cheems_ref import compiler, kernels

kernels._interpreted = lambda: False  # load every configuration, as on a GPU
x, B = torch.zeros(1, 128, 4, 64), torch.zeros(1, 128, 1, 64)
with compiler.compiling_for(80) as found:
    kernels.chunk_scan(x, torch.zeros(1, 128, 4), torch.zeros(4), B, B, chunk_size=64)
for kernel in map(compiler.resources, found):
    print(kernel.name, kernel.products, kernel.spilled)
"""


@needs_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is released for Linux only")
def test_float32_is_compiled_for_a_gpu_that_is_not_here(tmp_path):
    """What a first float32 call waits for on an A100: five kernels, once each. With plain float32
    products and all configurations it is longer than anybody waits; here it is seconds.
    """
    said = python(COMPILED, timeout=300, TRITON_CACHE_DIR=str(tmp_path))
    lines = [line.split() for line in said.splitlines()]
    assert len(lines) == len({name for name, *_ in lines}) == 5
    assert sum(int(products) > 0 for _, products, _ in lines) == 3  # state, C Bᵀ and scan
    assert max(int(spilled) for *_, spilled in lines) < 4096


@pytest.mark.usefixtures("torch_as_before")
def test_chapter_03_has_the_kernels_results_for_machines_that_cannot_run_them():
    """There the chapter compares a record with the recurrence, as it does the kernels here."""
    chapter = from_notebook("03_state_space_duality")
    record = json.loads((ROOT / "experiments" / "records" / "03_kernel.json").read_text())[
        "results"
    ]
    assert tuple(record) == chapter.NAMES
    truths = chapter.values_and_gradients(ssd_recurrent, chapter.kernel_inputs())
    for name, truth in truths.items():
        assert 1e-9 < relative(torch.tensor(record[name]), truth) < 1e-5, name  # in float32


def patched_things():
    import triton.language as tl
    from triton import JITFunction, knobs
    from triton.runtime.interpreter import InterpreterBuilder

    owners = (torch.cuda, JITFunction, InterpreterBuilder, tl, tl.core, tl.math)
    things = {(o.__name__, k): v for o in owners for k, v in vars(o).items()}
    modules = sorted(m for m in sys.modules if m.split(".")[0] == "mamba_ssm")
    settings = dict(vars(knobs.runtime)), dict(os.environ)
    return things, modules, list(warnings.filters), settings


@needs_kernel
def test_nothing_stays_patched():
    inputs = [t.requires_grad_() for t in draw((1, 5, 2, 8, 1, 8))]
    kernel(*inputs)[0].sum().backward()  # what first calls import stays
    before, same = patched_things(), []
    y, state = kernel(*inputs)
    same.append(patched_things() == before)
    for t in (y, inputs[0]):
        t.register_hook(lambda _: same.append(patched_things() == before))
    (y.sum() + state.sum()).backward()
    with torch.no_grad():
        state_update(*(t[:, 0] if t.dim() > 2 else t for t in inputs[:5]), inputs[6])
    same.append(patched_things() == before)
    with pytest.raises(AssertionError):  # mamba-ssm's own check that g divides h
        kernel(*draw((1, 5, 3, 8, 2, 8)))
    assert patched_things() == before and same == [True] * 4


@needs_kernel
def test_two_threads_at_once():
    cases = [draw((1, 20, 1, 8, 1, 8), seed=seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda inputs: kernel(*inputs)[0], cases)
    for y, inputs in zip(results, cases, strict=True):
        assert relative(y, recurrence(*(t.double() for t in inputs))[0]) < 1e-5


# --- what kernel_status says, on machines of every kind ----------------------------------------


def hide(name):
    return lambda patch: patch.setitem(sys.modules, name, None)


def uninstalled(patch):
    patch.setattr(importlib.util, "find_spec", lambda name: None)


def set_to_off(name):
    return lambda patch: patch.setenv(name, "0")


def imported_as_interpreter(patch):
    patch.setattr("triton.language.sum", "a function that is interpreted")


# A machine's GPU, what else is different there, the mode, and words of the reason.
MACHINES = [
    (False, lambda patch: None, "interpreter", "There is no GPU"),
    (False, set_to_off("TRITON_INTERPRET"), "none", "TRITON_INTERPRET to off"),
    (False, set_to_off("MAMBA_DETERMINISTIC"), "none", "found MAMBA_DETERMINISTIC off"),
    (False, uninstalled, "none", "mamba-ssm's kernels cannot be imported .*'mamba_ssm'"),
    (False, hide("triton"), "none", "Triton cannot be imported .*triton"),
    (True, lambda patch: None, "cuda", "compiled for this GPU"),
    (True, imported_as_interpreter, "interpreter", "although there is a GPU"),
]


@needs_kernel
@pytest.mark.parametrize(
    ("gpu", "change", "mode", "words"), MACHINES, ids=[m[-1] for m in MACHINES]
)
def test_status_on_machines_of_every_kind(monkeypatch, gpu, change, mode, words):
    """Simulated. Where the kernels cannot run, the reason is what a call says."""
    for name in ("TRITON_INTERPRET", "MAMBA_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(kernels, "_load", functools.cache(kernels._load.__wrapped__))
    change(monkeypatch)
    status = kernel_status()
    assert status.mode == mode and status.available == (mode != "none")
    assert re.search(words, status.reason) and "\n" not in status.reason
    inputs = [t.cpu() for t in draw((1, 1, 1, 1, 1, 1))]
    if mode == "none":
        with pytest.raises(RuntimeError, match=re.escape(status.reason)):
            kernel(*inputs)
    elif mode == "cuda":
        with pytest.raises(ValueError, match="here the kernels run on cuda tensors"):
            kernel(*inputs)


def test_status_on_another_system(monkeypatch):
    hide("triton")(monkeypatch)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "Linux only" in kernel_status().reason


# --- in a process of its own -------------------------------------------------------------------


def python(code, timeout=120, path=(), **environment):
    """Run code in a fresh interpreter that turns warnings into errors; return what it printed."""
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("TRITON_INTERPRET", "MAMBA_DETERMINISTIC", "TRITON_F32_DEFAULT")
    }
    env |= environment | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    said = re.sub("cheems_ref: mamba-ssm's .*\n", "", done.stderr)
    assert done.returncode == 0 and said == "", done.stderr
    return done.stdout


CHECK = """
import os, subprocess, sys
import torch
torch.cuda.is_available = lambda: False

def environment():  # torch keeps the place of its own cache there
    return {name: value for name, value in os.environ.items() if "TORCHINDUCTOR" not in name}

before, early = environment(), "triton" in sys.modules
from cheems_ref import ssd
assert early or "triton" not in sys.modules  # importing us must not import it
if "TRITON_INTERPRET" in os.environ:
    import triton
else:
    torch.optim.AdamW([torch.ones(1)])  # any optimizer of torch imports it
z = torch.linspace(-1, 1, 20 * 8).view(1, 20, 1, 8)
dt = torch.linspace(0.1, 1, 20).view(1, 20, 1)
A, B = torch.tensor([-0.5]), torch.cos(7 * z)
results = []
for form in (ssd.ssd_kernel, ssd.ssd_recurrent):
    x = z.clone().requires_grad_()
    y, state = form(x, dt, A, B, B, chunk_size=16, return_final_state=True)
    y.square().sum().backward()
    results.append((y, state, x.grad))
print(*(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(*results)))
"""
OWN = """
import torch, triton, triton.language as tl
from cheems_ref.kernels import launching

@triton.jit
def add(x, y, n, total, width: tl.constexpr):
    at = tl.arange(0, width)
    sums = tl.load(x + at, at < n, 0.0) + 1
    tl.store(y + at, sums, at < n)
    tl.store(total, sums.sum(axis=0) + tl.max(sums))

x = torch.arange(3.0)
y, total = torch.zeros(3), torch.zeros(1)
with launching(dict(x=x, y=y, total=total)):
    add[1,](x, y, 3, total, 4)
print(y.tolist(), total.item())
"""
UNCHANGED = """
import own
child = "import os; print([name for name in os.environ if 'TRITON' in name or 'MAMBA' in name])"
child = subprocess.check_output([sys.executable, "-c", child], text=True)
print(environment() == before, child)
"""


SET = pytest.param({"TRITON_INTERPRET": "1"}, marks=pytest.mark.program, id="set")


@needs_kernel
@pytest.mark.parametrize("asked", [pytest.param({}, id="unset"), SET])
def test_kernels_are_interpreted_whoever_imported_triton_first(tmp_path, asked):
    """So is a kernel of one's own, and the environment is left as it was: a child that runs on a
    machine with a GPU must not inherit a setting.
    """
    (tmp_path / "own.py").write_text(OWN)  # Triton reads the source of a kernel
    errors, own, left = python(CHECK + UNCHANGED, path=[tmp_path], **asked).strip().split("\n")
    assert max(map(float, errors.split())) < 1e-5
    assert own == "[1.0, 2.0, 3.0] 10.0" and left == f"True {[*asked]}"


MUTATIONS = (  # file, and text in one line of it: the decay of what a token adds to its chunk
    ("ssd_chunk_state.py", "tl.exp(tl.minimum((dA_cs_last - dA_cs_k), 0.0))"),  # forward
    ("ssd_combined.py", "tl.exp(tl.minimum((dA_cs_last - dA_cs_m), 0.0))"),  # in the gradient of x
)


@interpreted
@pytest.mark.program
def test_the_installed_source_is_what_runs(tmp_path):
    """Change two lines of a copy of mamba-ssm by one percent: the cross-check must fail."""
    original = Path(find_spec("mamba_ssm").submodule_search_locations[0])
    copy = tmp_path / "mamba_ssm"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in MUTATIONS:
        source = copy / "ops" / "triton" / file
        lines = source.read_text().split("\n")
        index = next(i for i, s in enumerate(lines) if text in s and not s.strip().startswith("#"))
        lines[index] = lines[index].replace(text, "1.01 * " + text)
        source.write_text("\n".join(lines))
    _, state, gradient = python(CHECK, path=[tmp_path]).split()
    assert float(state) > 1e-4 and float(gradient) > 1e-4
