"""Ask the compiler what a Triton kernel needs on a GPU, on a machine that has none.

    with compiling_for(90) as compiled:  # compute capability 9.0: an H100
        ssd_triton(x, dt, A, B, C)  # compiles what it would launch
    for kernel in compiled:
        print(resources(kernel))

Triton's compiler needs no GPU. It asks a driver which GPU there is, and calls `ptxas`, the
assembler of the CUDA toolkit, which comes with Triton and says how many registers a kernel takes.
So a stand-in for the driver is enough to compile exactly what a launch would: for these dtypes,
sizes and alignments. Only a GPU can tell how long they take.

Source: triton/backends/nvidia/compiler.py (3.7.1); CUDA C++ Programming Guide, "Compute
Capabilities", for the limits.
"""

import contextlib
import math
import re
import subprocess
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from cheems_ref import check, kernels

REGISTERS = 65_536  # of 32 bits, in a multiprocessor
TENSOR_CORE = r"\bmma\.sync|\bwgmma\.mma_async|\btcgen05\.mma\b"  # its instructions, in PTX


class _Limits(NamedTuple):
    """Warps, programs and bytes of shared memory of a multiprocessor; bytes for one program."""

    warps: int
    programs: int
    shared: int
    shared_of_one: int


GPUS = {
    80: _Limits(64, 32, 164 * 1024, 163 * 1024),  # A100
    86: _Limits(48, 16, 100 * 1024, 99 * 1024),  # RTX 3090
    89: _Limits(48, 24, 100 * 1024, 99 * 1024),  # RTX 4090, L4
    90: _Limits(64, 32, 228 * 1024, 227 * 1024),  # H100
    100: _Limits(64, 32, 228 * 1024, 227 * 1024),  # B200
}


class Resources(NamedTuple):
    """The resources that one compiled kernel needs.

    registers: of 32 bits, per thread, at most 255. spilled: bytes that a thread stores to memory
    and loads again, since its registers don't suffice; those in a loop count once. shared: bytes
    per program. products: instructions of a tensor core in the kernel's code. occupancy: warps that
    a multiprocessor can hold, of those that it could; 0 if it can't hold a single program.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    products: int
    occupancy: float


class StandIn:
    """A driver without a GPU: it tells Triton what to compile for."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # Triton keeps compiled kernels by device

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def compiling_for(capability: int) -> Iterator[list[Any]]:
    """Compile every kernel that is called, as a launch on such a GPU would, and launch none.

    Tensors may be on the CPU. Inside, functions return memory that no kernel has filled.
    Triton's autotuner compiles all of its configurations.

    Args:
        capability: 10 times the GPU's compute capability: 80, 86, 89, 90 or 100.

    Yields:
        a list that receives each compiled kernel once, for `resources`.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: TRITON_INTERPRET was set when Triton was imported: nothing can be compiled.
        ValueError: another capability.

    Source: none in the papers; see the notes at the top of this module.
    """
    check.choice(tuple(GPUS), capability=capability)
    from triton import JITFunction
    from triton.language import sum as of_triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver

    if not isinstance(of_triton, JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set: unset it and start Python again to compile")
    compiled, run, before = [], JITFunction.run, driver._active

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if all(kernel is not other for other in compiled):
            compiled.append(kernel)
        return kernel

    def every_configuration(self, *args, **options):
        for config in self.configs:
            self.fn.run(*args, **options, **config.all_kwargs())
        self.best_config = self.configs[0]  # as if it were the fastest; some launchers ask

    with kernels._lock, contextlib.ExitStack() as stack:
        for owner, name, value in (
            (JITFunction, "run", compile_only),
            (Autotuner, "run", every_configuration),
            (kernels, "_check", lambda tensors: "cuda"),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (torch.cuda, "get_device_properties", lambda device: PROCESSORS),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(setattr, driver, "_active", before)
        driver.set_active(StandIn(capability))
        yield compiled


PROCESSORS = types.SimpleNamespace(multi_processor_count=108)  # an A100's; some launches ask


def resources(kernel: Any) -> Resources:
    """Return what a kernel needs that `compiling_for` has compiled.

    Source: `ptxas -v`; CUDA C++ Programming Guide, "Maximize Utilization", for the occupancy.
    """
    limits, warps = GPUS[kernel.metadata.target.arch], kernel.metadata.num_warps
    shared, log = kernel.metadata.shared, _assembler_log(kernel)
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    products = len(re.findall(TENSOR_CORE, kernel.asm["ptx"]))
    # A warp's 32 threads receive registers by the 256; each program reserves 1 KiB more.
    of_warp = 256 * math.ceil(32 * registers / 256)
    programs = min(
        limits.programs,
        limits.warps // warps,
        REGISTERS // of_warp // warps,
        limits.shared // (shared + 1024),
    )
    programs = programs if shared <= limits.shared_of_one else 0
    occupancy = programs * warps / limits.warps
    return Resources(kernel.metadata.name, registers, spilled, shared, products, occupancy)


def _assembler_log(kernel):
    """Return what ptxas says of a kernel's PTX, with the options that Triton calls it with."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    arch = kernel.metadata.target.arch
    options = ["-lineinfo", "-v", "--regAllocOptLevel=2"]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(kernel.asm["ptx"])
        command = [get_ptxas(arch).path, *options, f"--gpu-name={sm_arch_from_capability(arch)}"]
        command += [source, "-o", target]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
