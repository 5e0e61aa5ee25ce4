"""Chapter 05: what dynamic masks hide, and whether an inner function buys what a layer would."""

from experiments import preregistered
from experiments.runner import from_notebook, resumed, rounded

CHAPTER = "05_inner_function_attention"


def masks():
    """What dynamic masks hide after training: gates by place.

    "places" is the control: no mask, but a learned embedding of the place. Before it was run, we
    expected it to get at least 0.99 right on all five seeds, since a gate is a score by place.
    """
    train_on_decoys = from_notebook(CHAPTER).train_on_decoys
    seeds, gates, decoys = range(5), {}, {}
    for kind in ("none", "printed", "gate", "rounded", "places"):
        runs = [train_on_decoys(kind, 200, seed) for seed in seeds]
        _, right, loss = zip(*runs, strict=True)
        decoys[kind] = {"right": rounded([right])[0], "loss": [round(x, 4) for x in loss]}
        mask = runs[0][0].mask
        if mask is not None:
            gates[kind] = mask.gate if kind == "printed" else mask.logit.sigmoid()
    later = {"steps": 2000}
    for kind in ("gate", "rounded"):
        layer, _, loss = train_on_decoys(kind, later["steps"])
        decoy = layer.mask.logit.sigmoid()[:, 1:16:2]
        later[kind] = {
            "loss": float(f"{loss:.2g}"),
            "decoys": rounded([[decoy.min().item(), decoy.max().item()]])[0],
            "open, per head": (decoy >= 0.5).sum(1).tolist(),
        }
    return {
        "seed": list(seeds),
        "decoys": decoys,
        "gates": {name: rounded(t.tolist()) for name, t in gates.items()},
        "later": later,
    }


def books_controlled():
    """Whether computing in the values buys what one more layer would."""
    return preregistered.inner_or_layer(
        lambda jobs: resumed("05_one_more_layer", jobs, run_on_books)
    )


def run_on_books(job):
    """One training run on the account books of chapter 05."""
    return preregistered.book_run(job, from_notebook(CHAPTER).account_books)


def past_controlled():
    """Which of q, k and v has to know the past, on chapter 07's recall."""
    return preregistered.who_needs_the_past(
        lambda jobs: resumed("05_who_needs_the_past", jobs, run_on_recall)
    )


def run_on_recall(job):
    """One training run of one attention layer on chapter 07's recall."""
    return preregistered.past_run(job, from_notebook("07_cheems_language_model").recall)


def value_first_controlled():
    """Which of q, k and v has to know the past, with the key first and with the value first."""
    return preregistered.value_first(lambda jobs: resumed("05_value_first", jobs, run_either_order))


def run_either_order(job):
    """One training run of one attention layer on pairs in either order."""
    return preregistered.value_first_run(job, from_notebook("07_cheems_language_model").recall)


def book_past_controlled():
    """Which of q, k and v has to know the past, on the account books."""
    return preregistered.book_past(lambda jobs: resumed("05_book_past", jobs, run_past_on_books))


def run_past_on_books(job):
    """One training run of one attention layer on the account books of chapter 05."""
    return preregistered.book_past_run(job, from_notebook(CHAPTER).account_books)


RECIPES = {
    "05_masks": masks,
    "05_one_more_layer": books_controlled,
    "05_who_needs_the_past": past_controlled,
    "05_value_first": value_first_controlled,
    "05_book_past": book_past_controlled,
}
