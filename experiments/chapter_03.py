"""Chapter 03: what mamba-ssm's kernels compute. Lab 03a: the rounding errors of four forms."""

import math
import statistics

import torch

from cheems_ref import kernels, ssd
from experiments.runner import from_notebook

CHAPTER = "03_state_space_duality"


def kernel_results():
    """What mamba-ssm's kernels compute in chapter 03, for machines where they can't run."""
    chapter = from_notebook(CHAPTER)
    tensors = [t.float() for t in chapter.kernel_inputs()]
    results = chapter.values_and_gradients(ssd.ssd_kernel, tensors, chunk_size=16)
    return {
        "kernel": kernels.kernel_status().mode,
        "results": {name: rounded_to_8_digits(t.tolist()) for name, t in results.items()},
    }


def rounded_to_8_digits(numbers):
    if isinstance(numbers, list):
        return [rounded_to_8_digits(one) for one in numbers]
    return float(f"{numbers:.8g}")


def error_budget():
    """Errors of four float32 computations of SSD, relative to float64, against length."""
    four_steps = from_notebook(CHAPTER).four_steps
    torch.set_default_dtype(torch.float32)

    def float32_total(x, *others):  # the chapter's own form keeps its total in the inputs' dtype
        return four_steps(x, *others, l_c=min(64, x.shape[1]))

    lengths = [2**i for i in range(4, 12)]
    forms = {
        "recurrence": ssd.ssd_recurrent,
        "chunked": ssd.ssd_chunked,
        "mamba-ssm's kernel": ssd.ssd_kernel,
        "chunked, total in float32": float32_total,
    }
    errors = {}
    for step in (0.05, 0.0005):
        memory = round(1 / (step * math.sqrt(2 / math.pi)))  # of the head with A = -1
        errors[str(memory)] = {name: [] for name in forms}
        for length in lengths:
            drawn = {name: [] for name in forms}
            for seed in range(5):
                generator = torch.Generator().manual_seed(seed)
                x, B, C = (torch.randn(1, length, h, 16, generator=generator) for h in (2, 1, 1))
                dt = step * torch.randn(1, length, 2, generator=generator).abs()
                tensors = (x, dt, torch.tensor([-1.0, -8.0]), B, C)
                truth = ssd.ssd_recurrent(*(t.double() for t in tensors))
                for name, form in forms.items():
                    error = (form(*tensors).double() - truth).abs().max() / truth.abs().max()
                    drawn[name].append(error.item())
            for name, values in drawn.items():
                errors[str(memory)][name].append(float(f"{statistics.median(values):.2e}"))
    return {
        "seed": list(range(5)),
        "kernel": kernels.kernel_status().mode,
        "lengths": lengths,
        "errors": errors,
    }


RECIPES = {"03_error_budget": error_budget, "03_kernel": kernel_results}
