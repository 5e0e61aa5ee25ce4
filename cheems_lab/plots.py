"""Pictures of losses, for `cheems train --plot` and `cheems compare --plot`."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cheems_lab.comparison import Evaluation
from cheems_ref.train import Run

FORMATS = (".svg", ".png", ".pdf")
POINTS = 200  # of a line of losses


def check_plot(path: Path | None) -> None:
    """Raise before a training, instead of after it, if --plot can't be written.

    Raises:
        ValueError: an unknown format, or a folder that does not exist.
        ModuleNotFoundError: matplotlib is missing.
    """
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ValueError(f"--plot {path} must end in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    import matplotlib.figure  # noqa: F401  # a ModuleNotFoundError names the extra


def plot_run(run: Run, path: Path) -> None:
    """Draw the losses of a run against its steps, and its held-out losses.

    Each point of the training loss is the mean over 1/200 of the steps, since the loss of a single
    step depends on its windows.
    """
    from cheems_ref import plotting

    fig, ax = plotting.figure(size=(7, 4.5))
    size = max(1, len(run.losses) // POINTS)
    pieces = [run.losses[i : i + size] for i in range(0, len(run.losses), size)]
    steps = [min(len(run.losses), (i + 1) * size) for i in range(len(pieces))]
    name = "training" if size == 1 else f"training, means of {size} steps"
    means = {name: [sum(piece) / len(piece) for piece in pieces]}
    plotting.lines(ax, steps, means, xlabel="step", ylabel="nats per byte")
    if run.evaluations:
        done, nats = zip(*run.evaluations, strict=True)
        plotting.lines(
            ax, done, {"held out": nats}, xlabel="step", ylabel="nats per byte", marker="o"
        )
    fig.savefig(path)


def plot_comparison(rows: Iterable[str], evaluations: Sequence[Evaluation], path: Path) -> None:
    """Draw held-out loss against steps: a line through the means, a band from lowest to highest."""
    from cheems_ref import plotting

    fig, ax = plotting.figure(size=(7, 4.5))
    for name in rows:
        at: dict[int, list[float]] = {}
        for e in evaluations:
            if e.row == name:
                at.setdefault(e.step, []).append(e.nats)
        steps = sorted(at)
        means = {name: [sum(at[step]) / len(at[step]) for step in steps]}
        plotting.lines(ax, steps, means, xlabel="step", ylabel="held-out nats per byte")
        plotting.band(ax, steps, *([f(at[step]) for step in steps] for f in (min, max)))
    fig.savefig(path)
