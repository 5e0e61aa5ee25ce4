"""Chapter 08: associative recall, trained; lab 08a: the needle."""

import time

from cheems_ref import text
from cheems_ref import train as training
from experiments import preregistered
from experiments.runner import from_notebook, jobs_and_results, resumed, rounded

CHAPTER = "08_associative_recall"
LAB = "labs/08a_needle"


def recall():
    """Multi-query recall: right at each length over time, by system, width and position."""
    chapter = from_notebook(CHAPTER)
    lengths, rates, seeds = chapter.LENGTHS, chapter.RATES, range(3)
    return recall_runs(
        "08_recall",
        seeds,
        positions=[
            recall_job(name, options, 64, seed, 2000, rates[64], lengths[:2])
            for seed in seeds
            for name, options in chapter.WITH_POSITION.items()
        ],
        grid=[
            recall_job(name, options, d, seed, 3000, rate, lengths)
            for d, rate in rates.items()
            for seed in seeds
            for name, options in chapter.SYSTEMS.items()
        ],
    )


def recall_rates():
    """Multi-query recall, small: four rates, longer runs, and the live ones of five seeds."""
    chapter = from_notebook(CHAPTER)
    systems, with_position = chapter.SYSTEMS, chapter.WITH_POSITION
    lengths, rates, seeds = chapter.LENGTHS, chapter.RATES, range(3)
    return recall_runs(
        "08_rates",
        seeds,
        longer=[recall_job("SSD", systems["SSD"], 64, 0, 20_000, rates[64], lengths[:2])],
        rates=[
            recall_job(name, systems[name], 32, seed, 2000, rates[32] * factor, lengths[:2])
            for factor in (1, 1 / 3, 3, 1 / 10)
            for seed in seeds
            for name in ("SSD", "QCAttn")
        ],
        live=[
            recall_job(name, (systems | with_position)[name], 32, seed, 200, rates[32], (32,))
            for seed in range(5)
            for name in ("SSD, attention, convolution", "QCAttn")
        ],
        alone=[
            recall_job("QCAttn", systems["QCAttn"], 64, seed, 3000, rates[64], lengths[-1:])
            for seed in seeds
        ],
        slower=[
            recall_job("SSD", systems["SSD"], 32, seed, 6000, rates[32] / 3, lengths[:2])
            for seed in seeds
        ],
    )


def recall_job(system, options, d, seed, steps, rate, lengths):
    told = dict(system=system, d=d, seed=seed, steps=steps, rate=rate, lengths=list(lengths))
    return dict(**told, options=options)


def recall_runs(name, seeds, **parts):
    runs = iter(resumed(name, [job for jobs in parts.values() for job in jobs], recall_run))
    record = {
        part: [{k: v for k, v in job.items() if k != "options"} | next(runs) for job in jobs]
        for part, jobs in parts.items()
    }
    minutes = sum(run["minutes"] for runs in record.values() for run in runs)
    return {"seed": list(seeds), "core hours": round(minutes / 60, 1), **record}


def recall_run(job):
    """One training run of chapter 08: minutes, and the share right at each length over time."""
    learn = from_notebook(CHAPTER).learn_to_recall
    start = time.perf_counter()
    size = {name: job[name] for name in ("d", "steps", "rate", "seed", "lengths")}
    _, right = learn(**size, **job["options"])
    return {"minutes": round((time.perf_counter() - start) / 60, 2), "right": rounded(right)}


def attention_maps():
    """What attention looks at in chapter 08's trained hybrid, and once its keys are others."""
    chapter = from_notebook(CHAPTER)
    options = chapter.WITH_POSITION[chapter.HYBRID]
    model, _ = chapter.learn_to_recall(32, 200, chapter.RATES[32], 0, (32,), **options)
    result = chapter.found_by(model.requires_grad_(False))
    maps = {name: rounded(rows) for name, rows in result.pop("maps").items()}
    return {"seed": 0, **result, "maps": maps}


def recall_rows():
    """The rows of chapter 08's section 5, each at its best rate."""
    chapter = from_notebook(CHAPTER)
    return preregistered.rows_at_their_rates(
        lambda jobs: resumed("08_rows", jobs, run_row), chapter.WITH_POSITION
    )


def run_row(job):
    """One training run of a row of chapter 08's section 5."""
    return preregistered.order_run(job, from_notebook(CHAPTER).learn_to_recall)


def state_sizes():
    """What one state layer of chapter 08's section 5 recalls, by the width of its state."""
    return preregistered.state_sizes(lambda jobs: resumed("08_state_size", jobs, run_row))


def needles():
    """The needle: four systems, short and long texts, each at the best of three rates."""
    lab = from_notebook(LAB)
    four, windows = lab.FOUR, lab.WINDOWS
    rates, seeds, steps = (1e-3, 3e-3, 3e-4), range(3), 2500

    def job(system, kind, seed, rate, with_text=False):
        told = dict(system=system, kind=kind, windows=list(windows[kind]), seed=seed, rate=rate)
        return dict(**told, steps=steps if not with_text else 1000, with_text=with_text)

    def order(one):
        """The share right at the longest texts, in tenths; then the fewer updates."""
        return -(one["right"][-1][-1] // 0.1), len(one["right"])

    def run(jobs):
        return jobs_and_results("08_needle", needle_run, jobs)

    tried = run([job(system, "short", 0, rate) for rate in rates for system in four])
    best = {
        system: min((one for one in tried if one["system"] == system), key=order)["rate"]
        for system in four
    }
    grid = run([job(s, kind, seed, best[s]) for kind in windows for seed in seeds for s in four])
    beside = run([job(system, "short", 0, best[system], with_text=True) for system in four])
    others = [one for one in tried if one["rate"] != best[one["system"]]]  # not in the grid
    minutes = sum(one["minutes"] for one in others + grid + beside)
    parts = {"best": best, "rates": tried, "grid": grid, "with text": beside}
    return {"seed": list(seeds), "core hours": round(minutes / 60, 1), **parts}


def needle_run(job):
    """One training run of lab 08a: the share right over time, and heat maps."""
    lab = from_notebook(LAB)
    start, window = time.perf_counter(), job["windows"][-1]
    how = {name: job[name] for name in ("windows", "steps", "rate", "seed", "with_text")}
    model, right = lab.learn_needles(job["system"], **how)
    result = {"right": rounded(right)}
    if not job["with_text"]:
        haystack = training.split_text(text.text_to_ids(text.read_text()), 0.1)[1]
        remedies = lab.VARIANTS
        if job["system"] == "Mamba-2":  # nothing in it is rotated, and it has no queries
            remedies = {"as trained": {}}
        heat = {k: lab.heat_map(model, window, haystack, **v) for k, v in remedies.items()}
        result["heat"] = {name: rounded(rows) for name, rows in heat.items()}
    return {"minutes": round((time.perf_counter() - start) / 60, 2), **result}


RECIPES = {
    "08_recall": recall,
    "08_rows": recall_rows,
    "08_rates": recall_rates,
    "08_state_size": state_sizes,
    "08_found": attention_maps,
    "08_needle": needles,
}
