"""Chapter 01: selective copying, and the same for longer."""

from experiments import preregistered
from experiments.runner import from_notebook, jobs_and_results

CHAPTER = "01_state_space_models"


def selective_copy():
    """Selective copying: accuracy against training steps, for five kinds of models."""
    chapter = from_notebook(CHAPTER)
    models = {
        "selective": dict(selective=True),
        "selective, no convolution": dict(selective=True, d_conv=1),
        "time-invariant, two layers": dict(selective=False, layers=2),
        "time-invariant": dict(selective=False),
        "time-invariant, no convolution": dict(selective=False, d_conv=1),
    }
    steps, seeds, right, ends = 600, range(5), {}, {}
    for name, options in models.items():
        runs = [
            chapter.train_to_copy(steps=steps, seed=seed, every=25, **options) for seed in seeds
        ]
        at_steps = list(zip(*(curve for _, curve, _ in runs), strict=True))
        places = {"median": 2, "low": 1, "high": 3}  # of the five
        right[name] = {k: [round(sorted(at)[i], 3) for at in at_steps] for k, i in places.items()}
        ends[name] = [round(end, 3) for end in at_steps[-1]]
    return {
        "seed": list(seeds),
        "steps": list(range(25, steps + 1, 25)),
        "right": right,
        "at the end": ends,
    }


def copy_run(job):
    """One model of chapter 01, trained to copy: accuracy every 50 updates."""
    train = from_notebook(CHAPTER).train_to_copy
    options = preregistered.COPY_LONGER[job["model"]]
    _, curve, _ = train(steps=job["steps"], seed=job["seed"], every=50, **options)
    return {"right": [round(share, 3) for share in curve]}


def copy_longer():
    """Selective copying with 2,000 updates instead of 600, for what hadn't finished."""
    jobs = [
        dict(model=model, seed=seed, steps=2000)
        for seed in preregistered.SEEDS
        for model in preregistered.COPY_LONGER
    ]
    return {
        "prediction": " ".join(preregistered.COPY_PREDICTION.split()),
        "seed": list(preregistered.SEEDS),
        "every": 50,
        "runs": jobs_and_results("01_copy_longer", copy_run, jobs),
    }


RECIPES = {"01_selective_copy": selective_copy, "01_copy_longer": copy_longer}
