"""Lab 02a: five update rules, trained on keys that are written several times."""

import statistics

from cheems_ref import linear_attention
from experiments.runner import from_notebook

LAB = "labs/02a_five_memories"


def learned():
    """Accuracy on keys that were written several times, after training, against their number."""
    train = from_notebook(LAB).train_on_notes
    steps, seeds, counts = 300, (0, 1, 2), (4, 8, 12, 16, 20, 24, 32, 40)
    accuracy, guess = {}, []
    for name in linear_attention.RULES:
        runs = [[train(name, keys, steps, seed) for seed in seeds] for keys in counts]
        accuracy[name] = [round(statistics.median(right for right, _ in run), 3) for run in runs]
        guess = [round(statistics.median(best for _, best in run), 3) for run in runs]
    return {
        "seed": list(seeds),
        "steps": steps,
        "keys": list(counts),
        "accuracy": accuracy,
        "best guess": guess,
    }


RECIPES = {"02_learned": learned}
