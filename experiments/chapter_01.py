"""Chapter 01: selective copying."""

from experiments.runner import from_notebook

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


RECIPES = {"01_selective_copy": selective_copy}
