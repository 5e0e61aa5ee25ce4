"""Print what the compiler makes of the kernels of triton_ssd.py, for GPUs that need not be there.

    python tests/bench/report_kernels.py [--capabilities 80 90 ...] [--json FILE]

For each GPU, dtype, and chunk size: registers, bytes spilled, shared memory, instructions of a
tensor core, and occupancy. At the end, the same for `_read` with larger tiles, where it spills, and
for a `_read` that computes its decays before its loop. Nothing is launched or timed.
"""

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import torch
import triton

from cheems_ref import triton_ssd
from cheems_ref.compiler import GPUS, Resources, compiling_for, resources

HEADS, WIDTH, STATE = 4, 64, 128  # cheems-1.3b's width and state
TILES = [(16, 32), (16, 64), (32, 32), (64, 64), (128, 64)]  # N and P
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


LOOP = "    scores = tl.zeros((q, q), tl.float32)\n"
DECAYS = """    since = _since(decay, mine, t < l)
    between = (since[:, None] - since[None, :]).to(tl.float32)
    L = tl.where(t[:, None] >= t[None, :], tl.exp(between), 0.0)
"""


def compiled(capability: int, dtype: str, chunk: int, kernels=triton_ssd) -> list[dict]:
    """What each kernel needs for two chunks."""
    x = torch.zeros(1, 2 * chunk, HEADS, WIDTH, dtype=DTYPES[dtype])
    B, dt = x.new_zeros(1, 2 * chunk, 1, STATE), torch.zeros(1, 2 * chunk, HEADS)
    with compiling_for(capability) as found:
        kernels.ssd_triton(x, dt, torch.zeros(HEADS), B, B, chunk_size=chunk)
    of = dict(capability=capability, dtype=dtype, chunk=chunk)
    return [of | resources(kernel)._asdict() for kernel in found]


def with_tiles(capability: int, N: int, P: int) -> dict:
    """What `_read` needs in float32, with tiles of N entries of the state and P channels."""
    with mock.patch.multiple(triton_ssd, N=N, P=P):
        read = compiled(capability, "float32", 64)[-1]
    return read | dict(N=N, P=P)


def with_decays_first(capability: int, dtype: str) -> dict:
    """What `_read` needs if it computes its decays before its loop."""
    source = Path(triton_ssd.__file__).read_text(encoding="utf-8")
    head, loop, tail = source.partition(LOOP)
    assert loop and DECAYS in tail, "_read has other lines: mend LOOP and DECAYS"
    with tempfile.TemporaryDirectory() as folder:  # Triton reads a kernel's source from its file
        path = Path(folder) / "decays_first.py"
        path.write_text(head + DECAYS + LOOP + tail.replace(DECAYS, "", 1), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        moved = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(moved)
        return compiled(capability, dtype, 64, moved)[-1]


def line(row: dict, *first: str) -> str:
    """One row of a table; `first` names the fields that come first."""
    fields = [row[name] for name in (*first, *Resources._fields)]
    return " ".join(f"{field:9}" if isinstance(field, str) else f"{field:9.6g}" for field in fields)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capabilities", type=int, nargs="+", default=[*GPUS], choices=GPUS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of the run")
    options = parser.parse_args()
    print("  GPU sm_     dtype     chunk kernel    registers spilled    shared  products occupancy")
    rows, tiles = [], []
    for capability in options.capabilities:
        for dtype in DTYPES:
            for chunk in (64, 32):
                rows += compiled(capability, dtype, chunk)
                for row in rows[-3:]:
                    print(line(row, "capability", "dtype", "chunk"), flush=True)
    print("\n_read in float32, by the sides of its tiles:\n  GPU sm_         N         P")
    for capability in options.capabilities:
        for N, P in TILES:
            tiles.append(with_tiles(capability, N, P))
            print(line(tiles[-1], "capability", "N", "P"), flush=True)
    print("\n_read with its decays before the loop:\n  GPU sm_     dtype")
    early = []
    for capability in options.capabilities:
        for dtype in DTYPES:
            early.append(with_decays_first(capability, dtype))
            print(line(early[-1], "capability", "dtype"), flush=True)
    if options.json:
        record = dict(
            command="python tests/bench/report_kernels.py --json FILE",
            machine=platform.machine(),
            versions=dict(triton=triton.__version__, torch=torch.__version__.partition("+")[0]),
            date=datetime.now(UTC).date().isoformat(),
            sizes=dict(heads=HEADS, p=WIDTH, n=STATE, warps=triton_ssd.WARPS),
            kernels=rows,
            tiles=tiles,
            decays_first=early,
        )
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
