"""Chapter 04: three sources of position; lab 04b: positions far beyond those of training; lab 04c:
trained state tracking.
"""

import json
import statistics

import torch

from cheems_ref import rope, ssd
from experiments import preregistered
from experiments.runner import RECORDS, from_notebook, resumed

CHAPTER, LAB = "04_rotary_positions", "labs/04c_state_tracking"


def shift_error():
    """How much moving all positions changes rotary SSD, with angles of three precisions."""
    length, n = 32, 64
    generator = torch.Generator().manual_seed(0)
    double = dict(generator=generator, dtype=torch.float64)
    x, B, C = (torch.randn(1, length, *size, **double) for size in ((2, 8), (1, n), (1, n)))
    dt = 0.1 * torch.randn(1, length, 2, **double).abs()
    A = -torch.tensor([1.0, 8.0], dtype=torch.float64)

    def output(shift, dtype):
        positions = (shift + torch.arange(length))[None]
        if dtype == torch.bfloat16:  # which rope_cos_sin refuses to do
            angles = positions[..., None].to(dtype) * rope.rope_frequencies(n).to(dtype)
            angles = torch.cat([angles, angles], dim=-1).double()
            cos, sin = angles.cos(), angles.sin()
        else:
            cos, sin = (t.double() for t in rope.rope_cos_sin(positions, n, dtype=dtype))
        return ssd.ssd_recurrent(
            x, dt, A, rope.apply_rope(B, cos, sin), rope.apply_rope(C, cos, sin)
        )

    shifts = [4**i for i in range(11)]
    errors = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        start = output(0, dtype)
        moved = [(output(shift, dtype) - start).abs().max() for shift in shifts]
        name = f"angles in {str(dtype).removeprefix('torch.')}"
        errors[name] = [float(f"{(m / start.abs().max()).item():.2e}") for m in moved]
    return {"seed": 0, "shifts": shifts, "errors": errors}


def three_sources():
    """Accuracy of naming the token `lag` tokens ago, for three sources of position."""
    train = from_notebook(CHAPTER).train_to_look_back
    lags, seeds, steps = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24), (0, 1, 2), 300
    positions = ("rope", "conv", "decay")
    accuracy = {position: [] for position in positions}
    for position in positions:
        for lag in lags:
            runs = [train(position, lag, steps, seed) for seed in seeds]
            accuracy[position].append(round(statistics.median(run[0] for run in runs), 3))
    return {
        "seed": list(seeds),
        "steps": steps,
        "lags": lags,
        "accuracy": accuracy,
    }


def reach_run(job):
    """One model that looks back."""
    chapter = from_notebook(CHAPTER)
    return preregistered.reach_run(job, chapter.train_to_look_back, chapter.look_back_batch)


def reach():
    """How far narrower convolutions reach, and by which scores."""
    return preregistered.reach(lambda jobs: resumed("04_reach", jobs, reach_run))


def tracking_run(job):
    """One training run of lab 04c."""
    lab = from_notebook(LAB)
    return preregistered.tracking_run(job, lab.train_to_track, lab.betas)


def state_tracking():
    """Lab 04c: parity and swaps, by decays, turns and mirrors that are trained."""
    lab = from_notebook(LAB)

    def run_all(jobs):
        return resumed("04_state_tracking", jobs, tracking_run)

    return preregistered.state_tracking(run_all, list(lab.MACHINES), list(lab.STEPS))


def share_right(model):
    """The share right at places 201 to 300 of 256 texts that no run was measured on."""
    lab = from_notebook(LAB)
    generator = torch.Generator().manual_seed(1000)
    ids, answers = lab.texts_and_answers(lab.MACHINES["three swaps"], 256, 300, generator)
    with torch.no_grad():
        return (model(ids).argmax(-1) == answers)[:, 200:].double().mean().item()


def set_to_two(model):
    """Give every token the β of a whole mirror: 2 σ(50) is 2 in float32."""
    with torch.no_grad():
        model.steer.weight[4].zero_()
        model.steer.bias[4] = 50.0


def exact_mirrors_run(job):
    """One of the five models of lab 04c that learned the cards, trained again."""
    lab = from_notebook(LAB)
    return preregistered.exact_run(job, lab.train_to_track, share_right, set_to_two)


def exact_mirrors():
    """Lab 04c: the trained cards, with every β set to 2."""
    record = json.loads((RECORDS / "04_state_tracking.json").read_text())
    [row] = [r for r in record["table"] if (r["task"], r["kind"]) == ("three swaps", "β up to 2")]
    jobs = [dict(seed=seed, rate=row["rate"]) for seed in preregistered.SEEDS]
    return {
        "prediction": " ".join(preregistered.EXACT_PREDICTION.split()),
        "seed": list(preregistered.SEEDS),
        "runs": resumed("04_exact_mirrors", jobs, exact_mirrors_run),
    }


RECIPES = {
    "04_shift_error": shift_error,
    "04_three_sources": three_sources,
    "04_reach": reach,
    "04_state_tracking": state_tracking,
    "04_exact_mirrors": exact_mirrors,
}
