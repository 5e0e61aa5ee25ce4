"""Write the records that figures are drawn from where a live run would not be reproducible.

    python book/records.py NAME ...

A record holds what a figure shows, and how it came about: command, machine, versions, date.
"""

import argparse
import datetime
import json
import math
import platform
import statistics
from pathlib import Path

import torch

from cheems_ref import kernels, ssd, text

RECORDS = Path(__file__).parents[1] / "figures" / "records"


def letters():
    """The states of three counting heads over the first bytes of Python's manual."""
    rows = " etaoinshrdlcumfpgwybvk"
    length, half_lives = 400, (4, 32, 256)
    ids = text.text_to_ids(text.read_text())[:length]
    key = torch.nn.functional.one_hot(ids, 256).double()[None, :, None]  # (b, l, g, n)
    rate = -torch.tensor(2.0).log().double() / torch.tensor(half_lives).double()
    ones = torch.ones(1, 1, len(half_lives), dtype=torch.float64)
    state, states = torch.zeros(1, len(half_lives), 1, 256, dtype=torch.float64), []
    for t in range(length):
        _, state = ssd.ssd_step(ones[:, 0, :, None], ones[:, 0], rate, key[:, t], key[:, t], state)
        states.append(state[0, :, 0])
    counts = torch.stack(states)[:, :, list(rows.encode())]  # (l, h, letters)
    return {
        "seed": None,
        "letters": ["space" if letter == " " else letter for letter in rows],
        "states": {
            str(half_life): [[round(c, 4) for c in row] for row in counts[:, i].tolist()]
            for i, half_life in enumerate(half_lives)
        },
    }


def error_budget():
    """Errors of three float32 computations of SSD, relative to float64, against length."""
    lengths = [2**i for i in range(4, 12)]
    forms = {
        "recurrence": ssd.ssd_recurrent,
        "chunked": ssd.ssd_chunked,
        "mamba-ssm's kernel": ssd.ssd_kernel,
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


WRITERS = {"03_letters": letters, "03_error_budget": error_budget}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="+", choices=WRITERS, metavar="NAME", help=", ".join(WRITERS)
    )
    for name in parser.parse_args().names:
        record = {
            "command": f"python book/records.py {name}",
            "machine": platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "date": datetime.date.today().isoformat(),
            **WRITERS[name](),
        }
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / f"{name}.json").write_text(json.dumps(record) + "\n")
        print(f"figures/records/{name}.json")


if __name__ == "__main__":
    main()
