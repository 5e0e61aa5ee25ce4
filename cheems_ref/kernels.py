"""mamba-ssm's SSD kernels: on the GPU where there is one, else in Triton's interpreter.

Only this module imports mamba-ssm or calls Triton's interpreter. It defines no algorithm and runs
three functions of mamba-ssm 2.3.2.post1:

* the forward and the backward half of ``mamba_chunk_scan_combined`` (a sequence), and
* ``selective_state_update`` (one token).

A Triton kernel is a Python function. On a GPU it is compiled; Triton's interpreter executes the
same source on CPU tensors, program by program, with NumPy as the arithmetic unit. That is slow, and
it checks what the source *means*: not the compiler, nor races, nor TF32.

mamba-ssm writes its kernels for 16-bit tensors. On a GPU each kernel is compiled in about ten
configurations, and the fastest one is kept. Float32 would need registers that no GPU has: with
plain float32 products, the smallest configuration spills 10 KB per thread on an A100, and the
largest is not compiled after minutes. So float32 tensors get the smallest configuration only, and
"tf32x3" products, three of a tensor core for each, which keep nearly all digits. That is for
cross-checks: `ssd(backend="auto")` gives float32 the chunked form.

Triton chooses the interpreter by an environment variable, ``TRITON_INTERPRET``, which it reads when
a function is decorated. A child process would inherit the variable, and interpret its kernels even
on a GPU. So this module leaves the environment alone: without a GPU, it passes the decorated
functions to the interpreter while a kernel runs, no matter who imported Triton first. It respects a
variable that you set yourself.

Letters: b batch, l length, h heads, g groups, p head width, n state.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

Mode = Literal["cuda", "interpreter", "none"]

# One kernel at a time: the interpreter keeps the current program's index in a global object.
_lock = threading.RLock()


class KernelStatus(NamedTuple):
    """Whether the kernels can run here, how, and one sentence with the reason and a remedy."""

    available: bool
    mode: Mode
    reason: str


class _Kernels(NamedTuple):
    forward: Callable
    backward: Callable
    update: Callable
    tunings: int  # block sizes among which one kernel would choose, by timing them on a GPU
    smallest: list[tuple]  # what chooses the configuration of each kernel, and its smallest one


# Why the kernels run as they do, or cannot run, and what to do.
REASONS = {
    "no Triton": "Triton cannot be imported ({error}): run `make course`, or "
    "`pip install -c constraints.txt '.[kernels]'`.",
    "not Linux": "Triton is released for Linux only, so mamba-ssm's kernels cannot run on this "
    "system; every other form works, and Linux (WSL too) has this one.",
    "interpreter off": "There is no GPU, and the environment sets TRITON_INTERPRET to off: unset "
    "it and start Python again.",
    "no mamba-ssm": "mamba-ssm's kernels cannot be imported ({error}): run `make course`, or the "
    "installation line for mamba-ssm 2.3.2.post1 in book/manual/setting_up.md.",
    "tuning": "mamba-ssm was imported before cheems_ref, or found MAMBA_DETERMINISTIC off, so its "
    "kernels want to time block sizes on a GPU: unset that, start Python again and import "
    "cheems_ref first.",
    "compiled": "mamba-ssm's kernels are compiled for this GPU, so there is nothing to do.",
    "no GPU": "There is no GPU, so mamba-ssm's kernels run in Triton's interpreter, right but "
    "slowly: use a machine with one for speed.",
    "interpreter on": "TRITON_INTERPRET is set, so mamba-ssm's kernels run in Triton's "
    "interpreter, on CPU tensors, although there is a GPU: unset it and start Python again to use "
    "the GPU.",
}


def kernel_status() -> KernelStatus:
    """Determine whether the kernels can run in this process, and how; never raises.

    Returns:
        ``mode`` is ``"cuda"``, ``"interpreter"`` or ``"none"``; ``available`` is whether it is not
        ``"none"``; ``reason`` is one sentence for people, which differs between machines.

    Source: none in the papers; see the notes at the top of this module.
    """
    gpu = torch.cuda.is_available()
    setting = os.environ.get("TRITON_INTERPRET", "1").lower()
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return _status("none", "no Triton" if sys.platform == "linux" else "not Linux", error)
    if not gpu and setting not in ("1", "true", "on", "y", "yes"):
        return _status("none", "interpreter off")
    try:
        kernels = _load()
    except (ImportError, AttributeError, RuntimeError) as error:  # absent, or another version
        return _status("none", "no mamba-ssm", error)
    if not _interpreted():
        return _status("cuda", "compiled")
    if kernels.tunings > 1:
        return _status("none", "tuning")
    return _status("interpreter", "interpreter on" if gpu else "no GPU")


def _status(mode, reason, error=None):
    return KernelStatus(mode != "none", mode, REASONS[reason].format(error=error))


def can_take(x: Tensor) -> bool:
    """Return whether "auto" gives x to the compiled kernels: on a GPU, in 16 bits."""
    sixteen_bits = x.dtype in (torch.float16, torch.bfloat16)
    return x.is_cuda and sixteen_bits and kernel_status().mode == "cuda"


# torch.compile must skip the kernels; torch.compiler.disable would import Dynamo and Triton here.
@torch._disable_dynamo
def chunk_scan(
    x: Float[Tensor, "b l h p"],
    dt: Float[Tensor, "b l h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b l g n"],
    C: Float[Tensor, "b l g n"],
    *,
    D: Float[Tensor, " h"] | None = None,
    chunk_size: int = 64,
    initial_state: Float[Tensor, "b h p n"] | None = None,
) -> tuple[Float[Tensor, "b l h p"], Float[Tensor, "b h p n"]]:
    """Run mamba-ssm's chunked scan over a sequence.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t ⊗ B_t and y_t = h_t C_t + D x_t for every head, where head
    i reads B and C of group i // (h/g). Differentiable once, in every tensor argument, through both
    results. Shapes, h % g == 0 and dt >= 0 are the caller's to check.

    Args:
        x: input; x, B and C share one of float32, float16, bfloat16.
        dt: step size after softplus, dimensionless; dt and A may be float32 beside 16-bit x.
        A: decay rate per head, negative, per unit of dt.
        B: input map, one per group.
        C: output map, one per group.
        D: skip weight per head.
        chunk_size: tokens per chunk, any number >= 1. The result does not depend on it; the kernel
            uses the next power of two, at least 16 (the smallest tile of a tensor core) and at
            most 256 (its scores take chunk² numbers, and mamba-ssm's own setting is 256).
        initial_state: state before the first token; zeros if None.

    Returns:
        y in the dtype of x, and the state after the last token in float32. Without any token
        (l = 0) y is empty and the state is the initial one.

    Raises:
        RuntimeError: the kernels cannot run here (the message is `kernel_status().reason`).
        TypeError: a tensor is float64, which the kernel would silently compute in float32.
        ValueError: a tensor is not on the device where the kernels run.

    Source: WM §2 and App. A; mamba_ssm/ops/triton/ssd_combined.py, mamba_chunk_scan_combined.
    """
    names = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "initial_state": initial_state}
    mode = _check(names)
    # Expanded tensors (stride 0) have no layout that a gradient could be written to.
    tensors = [None if t is None else t.contiguous() for t in names.values()]
    kernel_chunk = min(256, max(16, 1 << (chunk_size - 1).bit_length()))
    return _ChunkScan.apply(*tensors, kernel_chunk, mode)


@torch._disable_dynamo
def state_update(
    x: Float[Tensor, "b h p"],
    dt: Float[Tensor, "b h"],
    A: Float[Tensor, " h"],
    B: Float[Tensor, "b g n"],
    C: Float[Tensor, "b g n"],
    state: Float[Tensor, "b h p n"],
    *,
    D: Float[Tensor, " h"] | None = None,
) -> tuple[Float[Tensor, "b h p"], Float[Tensor, "b h p n"]]:
    """Run mamba-ssm's decode kernel: one token of `chunk_scan`, for inference.

    Args:
        x, dt, A, B, C, D: as in `chunk_scan`, without the length axis.
        state: state before the token; it is copied, not changed.

    Returns:
        y in the dtype of x, and the state after the token in float32.

    Raises:
        RuntimeError, TypeError: as in `chunk_scan`.
        ValueError: a tensor is not on the device where the kernels run, or a gradient is wanted:
            this kernel has no backward.

    Source: WM §2; mamba_ssm/ops/triton/selective_state_update.py; Mamba2.step in mamba_ssm/modules.
    """
    names = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "state": state}
    mode = _check(names)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in names.values()):
        raise ValueError(
            "the decode kernel has no backward: call it under torch.no_grad(), or use "
            "a torch form (or the chunked kernel on one token) where gradients matter"
        )
    b, h, p, n = state.shape
    state = state.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if x.numel() == 0:  # an empty grid: nothing to launch
        return torch.empty_like(x), state
    # Stride 0 along p and n tells the kernel that a head has one dt and one A (as in Mamba2.step).
    # dt_bias and D must be tensors, since 2.3.2.post1 asks for their strides without looking.
    zeros = torch.zeros(h, dtype=torch.float32, device=x.device)
    dt, A = dt[..., None].expand(b, h, p), A[:, None, None].expand(h, p, n)
    D, bias = (t[:, None].expand(h, p) for t in (zeros if D is None else D, zeros))
    with _launching(mode, "decoding", x.dtype):
        y = _load().update(state, x, dt, A, B, C, D=D, dt_bias=bias)
    return y, state


class _ChunkScan(torch.autograd.Function):
    """The two halves of mamba_chunk_scan_combined, each under the shims.

    mamba-ssm's own autograd Function would run its backward outside of them.
    """

    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, initial_state, chunk, mode):
        ctx.save_for_backward(x, dt, A, B, C, D, initial_state)
        ctx.chunk, ctx.mode = chunk, mode
        if x.numel() == 0:  # an empty grid crashes the interpreter
            shape = (x.shape[0], *x.shape[2:], B.shape[-1])
            state = x.new_zeros(shape, dtype=torch.float32)
            return torch.empty_like(x), state if initial_state is None else state + initial_state
        with _launching(mode, "forward", x.dtype):
            y, *_, final_state = _load().forward(
                x, dt, A, B, C, chunk, D=D, initial_states=initial_state
            )
        return y, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dfinal_state):
        inputs = x, dt, A, B, C, D, initial_state = ctx.saved_tensors
        if x.numel() == 0:
            grads = [None if t is None else torch.zeros_like(t) for t in inputs[:-1]]
            grads.append(dfinal_state)
        else:
            dy = dy.contiguous()
            # y itself is not needed without a gate, only its shape: dy
            with _launching(ctx.mode, "backward", x.dtype):
                states = dict(initial_states=initial_state, dfinal_states=dfinal_state.contiguous())
                dx, ddt, dA, dB, dC, dD, _, _, dinitial = _load().backward(
                    dy, x, dt, A, B, C, dy, ctx.chunk, D=D, **states
                )
            grads = [dx, ddt, dA, dB, dC, dD, dinitial]
        wanted = zip(inputs, grads, ctx.needs_input_grad, strict=False)
        return *(g.to(t.dtype) if need else None for t, g, need in wanted), None, None


def launching(tensors: dict[str, Tensor]) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that lets your own Triton kernels launch.

    Args:
        tensors: the kernels' tensors by name; one of them is "x".

    Raises:
        RuntimeError, TypeError, ValueError: as `chunk_scan`.
    """
    mode = _check(tensors)
    return torch.cuda.device(tensors["x"].device) if mode == "cuda" else _interpreting()


def _check(tensors: dict[str, Tensor | None]) -> Mode:
    """Validate dtypes and devices, and return the mode of the kernels."""
    status = kernel_status()
    if not status.available:
        raise RuntimeError(status.reason)
    place = "cuda" if status.mode == "cuda" else "cpu"
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"{name} is {tensor.dtype}, but the kernels compute in float32: "
                "convert it, or use a torch form, which keeps the dtype of its input"
            )
        if tensor.device.type != place or tensor.device != tensors["x"].device:
            raise ValueError(
                f"{name} is on {tensor.device} and x on {tensors['x'].device}, but "
                f"here the kernels run on {place} tensors, all on one device: move "
                "them, or use a torch form, which runs anywhere"
            )
    return status.mode


def _interpreted() -> bool:
    """Return whether kernels are interpreted: without a GPU, or because of TRITON_INTERPRET."""
    import triton
    import triton.language as tl

    # A function of Triton's own shows what the setting was when Triton was imported.
    return not torch.cuda.is_available() or not isinstance(tl.sum, triton.JITFunction)


@functools.cache
def _load() -> _Kernels:
    """Import the kernels without running ``mamba_ssm/__init__.py``; leave sys.modules as it was.

    That file needs a compiled extension and transformers, which SSD does not use. Once loaded, the
    functions need no entry in sys.modules; the user's own `import mamba_ssm` starts afresh.
    """
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Deterministic mode: set ...": on purpose, not news
        known = set(sys.modules)
        if "mamba_ssm" not in known:
            spec = importlib.util.find_spec("mamba_ssm")
            if spec is None:
                raise ModuleNotFoundError("No module named 'mamba_ssm'")
            parent = types.ModuleType("mamba_ssm")  # a package with a path and no code
            parent.__path__ = list(spec.submodule_search_locations)
            sys.modules["mamba_ssm"] = parent
        try:
            determinism = importlib.import_module("mamba_ssm.utils.determinism")
            if _interpreted() and "MAMBA_DETERMINISTIC" not in os.environ:
                # One block size per kernel: there is no device to time several on.
                determinism.set_deterministic_mode(True)
            ssd = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
            step = importlib.import_module("mamba_ssm.ops.triton.selective_state_update")
            names = [name for name in sys.modules if name.startswith("mamba_ssm.ops.triton.")]
            rooms = [sys.modules[name] for name in names]
            smallest = _smallest(rooms, determinism)
        finally:
            if "mamba_ssm" not in known:
                for name in set(sys.modules) - known:
                    if name == "mamba_ssm" or name.startswith("mamba_ssm."):
                        del sys.modules[name]
    return _Kernels(
        forward=ssd._mamba_chunk_scan_combined_fwd,
        backward=ssd._mamba_chunk_scan_combined_bwd,
        update=step.selective_state_update,
        tunings=len(ssd._chunk_scan_chunk_state_bwd_dx_kernel.configs),
        smallest=smallest,
    )


def _smallest(modules, determinism) -> list[tuple]:
    """Return each autotuner in some modules of mamba-ssm, and its smallest configuration in a list.

    Smallest is what mamba-ssm's deterministic mode takes: the least tile, times the stages.
    """
    from triton.runtime.autotuner import Autotuner

    tuners = [t for module in modules for t in vars(module).values() if isinstance(t, Autotuner)]
    cost = determinism._estimate_config_cost
    return [(tuner, [min(tuner.configs, key=cost)]) for tuner in tuners]


def _launching(mode: Mode, half: str, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Return a context in which mamba-ssm's kernels can be launched: its forward half, or another.

    Kernel calls of this module wait for each other. Replacements are global: while a kernel runs,
    no other thread should use torch.cuda, Triton or the warning filters.
    """
    return _compiling(half, dtype) if mode == "cuda" else _interpreting()


@contextlib.contextmanager
def _compiling(half: str, dtype: torch.dtype) -> Iterator[None]:
    """Let Triton compile float32 with few registers, and say that compiling takes a while."""
    print_once(
        f"cheems_ref: mamba-ssm's {half} kernels are compiled for {str(dtype)[6:]} at their first "
        "use on this GPU. That can take minutes; later processes find them in Triton's cache."
    )
    with _lock, _float32_products(), contextlib.ExitStack() as stack:
        for tuner, smallest in _load().smallest if dtype == torch.float32 else ():
            stack.enter_context(mock.patch.object(tuner, "configs", smallest))
        yield


@functools.cache
def print_once(message: str) -> None:
    """Print a message to stderr, the first time it is given."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Let launchers written for CUDA run in Triton's interpreter, on CPU tensors."""
    from triton import JITFunction, knobs
    from triton.language import core
    from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

    one_processor = types.SimpleNamespace(multi_processor_count=1)
    with _lock, warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # NumPy's remarks on masked lanes
        plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
        interpreted = functools.cache(InterpretedFunction)

        def run(self, *args, **kwargs):
            return interpreted(self.fn).run(*args, **kwargs)

        def call(self, *args, **kwargs):
            return interpreted(self.fn)(*args, **kwargs)

        def method(self, tensor, owner):
            return functools.partial(self, tensor)

        def dot(self, a, b, acc, precision, imprecise):
            a, b = (self.create_fp_ext(t, acc.dtype) if t.dtype.is_bf16() else t for t in (a, b))
            return plain_dot(self, a, b, acc, precision, imprecise)

        def cast(self, source, target):
            if not (source.dtype.scalar.is_fp32() and target.scalar.is_bf16()):
                return plain_cast(self, source, target)
            bits = torch.tensor(source.data, device="cpu").to(torch.bfloat16).view(torch.uint16)
            return TensorHandle(bits.numpy(), target.scalar)

        for owner, name, value in (
            # Functions that were decorated for the compiler: kernels, functions that kernels call,
            # and functions that kernels call as methods of a tensor.
            (JITFunction, "run", run),
            (JITFunction, "__call__", call),
            (JITFunction, "__get__", method),
            # Launchers enter the tensor's device, and a CPU tensor's index is None.
            (torch.cuda, "device", contextlib.nullcontext),
            # Two backward kernels split their work by the number of the GPU's processors.
            (torch.cuda, "get_device_properties", lambda device: one_processor),
            # The interpreter keeps bfloat16 as its 16 bits and would multiply those as integers.
            (InterpreterBuilder, "create_dot", dot),
            # It cuts float32 off to bfloat16, where the hardware rounds to the nearest.
            (InterpreterBuilder, "cast_impl", cast),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        # Assigned as an attribute, the setting would be written to the environment.
        stack.enter_context(mock.patch.dict(vars(knobs.runtime), interpret=True))
        # The interpreter patches this module too and forgets to take most of that back (3.7.1).
        stack.callback(vars(core).update, dict(vars(core)))
        yield


@contextlib.contextmanager
def _float32_products() -> Iterator[None]:
    """Let Triton make a float32 product of three TF32 ones, unless the environment asks for a kind.

    The default is a single one, whose 10-bit mantissa is far from the 1e-5 of a cross-check;
    ``TRITON_F32_DEFAULT=tf32`` gives the speed back. "ieee" has no tensor core and too many
    registers. The variable is set in the environment for the launch, since Triton caches compiled
    kernels by it.

    Source: triton/knobs.py and get_cache_invalidating_env_vars (3.7.1).
    """
    if "TRITON_F32_DEFAULT" in os.environ:
        yield
        return
    os.environ["TRITON_F32_DEFAULT"] = "tf32x3"
    try:
        yield
    finally:
        os.environ.pop("TRITON_F32_DEFAULT", None)
