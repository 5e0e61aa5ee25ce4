"""What `python -m cheems_ref compare` does: runs, and a table that grows while they train.

On a terminal the table is drawn anew in its place with every evaluation; elsewhere an evaluation is
a line, and the table stands at the end.
"""

import dataclasses
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cheems_ref.arguments import BYTES
from cheems_ref.budget import count_parameters
from cheems_ref.checkpoint import save
from cheems_ref.command_line import _device, _must_fit, check_fields_are_used, guarded
from cheems_ref.compare import (
    Evaluation,
    Interval,
    Row,
    compare,
    difference,
    interval,
    last_losses,
    read_evaluations,
    run_directory,
)
from cheems_ref.config import ModelConfig
from cheems_ref.text import Corpus, read_corpus, read_text, text_to_ids
from cheems_ref.train import TrainConfig
from cheems_ref.watch import ctrl_c, in_shell, say

SHOWN = 6  # seeds whose losses the table shows one by one


def carry_out(parsed) -> int:
    """Compare what was asked for, and return the status of the process."""
    return guarded(_compare, parsed)


def table(
    rows: Mapping[str, Row], evaluations: Sequence[Evaluation], steps: int, seeds: Sequence[int]
) -> list[str]:
    """Return the lines of a table: parameters, losses of finished runs, differences to the first.

    Args:
        rows: as for `compare`; the first is what the others are compared with.
        evaluations: as many as there are so far.
        steps: updates of a finished run.
        seeds: those that are asked for.
    """
    evaluations = [e for e in evaluations if e.seed in seeds]
    losses = last_losses([e for e in evaluations if e.step == steps])
    baseline, lines = next(iter(rows)), []
    for name, row in rows.items():
        counts = count_parameters(row.config).values()
        total, active = (sum(getattr(c, kind) for c in counts) for kind in ("total", "active"))
        mine = losses.get(name, {})
        each = " ".join(f"{mine[seed]:.3f}" for seed in seeds[:SHOWN] if seed in mine)
        mean = _shown(interval([*mine.values()])) if mine else _under_way(name, evaluations)
        both = mine.keys() & losses.get(baseline, {}).keys()
        apart = ""
        if name != baseline and both:
            apart = _judged(difference(losses, name, baseline))
        lines.append((name, f"{total:,}", f"{active:,}", mean, each, apart))
    head = ("row", "parameters", "at work", "held-out nats", "each seed", f"less {baseline}")
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *lines)
    ]


def _shown(number: Interval, sign=""):
    width = "" if math.isinf(number.half_width) else f" ± {number.half_width:.3f}"
    return f"{number.mean:{sign}.3f}{width}"


def _judged(apart: Interval):
    if math.isinf(apart.half_width):
        return f"{_shown(apart, '+')}  one seed tells nothing"
    return f"{_shown(apart, '+')}  {'no difference' if apart.holds_zero else 'a difference'}"


def _under_way(name, evaluations):
    """The last evaluation of a row of which no run is finished."""
    mine = [e for e in evaluations if e.row == name]
    return f"{mine[-1].nats:.3f} after {mine[-1].step}" if mine else ""


def _compare(a):
    device, seeds = _device(a), range(a.seeds)
    rows = {name: _row(name, fields, a.set) for name, fields in a.row.items()}
    check_fields_are_used(a.set, *(row.config for row in rows.values()))
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**{k: v for k, v in vars(a).items() if k in names and v is not None})
    for row in rows.values():
        total = sum(c.total for c in count_parameters(row.config).values())
        _must_fit(row.config, config, device, total)
    corpus = _corpus(a.text, config.held_out)
    config = dataclasses.replace(config, held_out=corpus.held_out)
    kept, apart = corpus.texts
    say(
        f"{len(corpus.ids):,} bytes, {kept} texts to train on and {apart} held out; "
        f"{len(rows)} rows, {a.seeds} seeds, {config.steps} updates of "
        f"{config.batch_size * config.length:,} bytes; on {device}"
    )
    watch = _Watch(a.run, rows, config.steps, seeds)
    try:
        with ctrl_c(watch):
            evaluations = compare(
                rows,
                corpus.ids,
                config,
                seeds=seeds,
                directory=a.run,
                device=device,
                after_step=watch.goes_on,
            )
    except KeyboardInterrupt:
        print(f"\nstopped; to go on: {in_shell(*a.words)}", file=sys.stderr)
        return 130
    watch.draw(evaluations, last=True)
    if a.plot is not None:
        _plot(rows, evaluations, a.plot)
        say(f"drawn: {a.plot}")
    return 0


def _row(name, fields, common):
    fields = dict(fields)
    rate = fields.pop("learning_rate", None)
    try:
        config = ModelConfig(**{"vocab_size": BYTES, **common, **fields})
    except (ValueError, TypeError) as error:
        raise type(error)(f"--row {name}: {error}") from error
    check_fields_are_used(fields, config, option=f"--row {name}:")
    return Row(config, rate)


def _corpus(path, held_out):
    """A file is cut near its end; of many texts some are held out whole."""
    if path is None or Path(path).is_dir():
        return read_corpus(path, held_out=held_out)
    return Corpus(text_to_ids(read_text(path), dtype=torch.uint8), held_out, (1, 1))


class _Watch:
    """A comparison while it trains: the table, and what Ctrl-C asks of it."""

    def __init__(self, directory, rows, steps, seeds):
        self.directory, self.rows, self.steps, self.seeds = directory, rows, steps, seeds
        self.asked, self.drawn = False, 0
        self.redraws = sys.stdout.isatty()

    def goes_on(self, name, run):
        if run.evaluations and run.evaluations[-1][0] == run.step:
            if self.redraws:
                self.draw(read_evaluations(self.directory))
            else:
                seed, (step, nats) = run.config.seed, run.evaluations[-1]
                say(f"{name}, seed {seed}: held out {nats:.3f} nats after {step} of {self.steps}")
        if self.asked and run.step < self.steps:
            save(run, run_directory(self.directory, name, run.config.seed))
            raise KeyboardInterrupt

    def draw(self, evaluations, *, last=False):
        """Print the table, over the one before where that is on a terminal."""
        lines = table(self.rows, evaluations, self.steps, self.seeds)
        if self.redraws:
            columns = shutil.get_terminal_size().columns
            lines = lines if last else [line[: columns - 1] for line in lines]
            up = f"\x1b[{self.drawn}A\x1b[J" if self.drawn else ""
            print(up, end="")
            self.drawn = len(lines)
        say("\n".join(lines))


def _plot(rows, evaluations, path):
    """Held-out loss against updates: a line through the means, a band from lowest to highest."""
    from cheems_ref import plotting

    fig, ax = plotting.figure(size=(7, 4.5))
    for name in rows:
        at = {}
        for e in evaluations:
            if e.row == name:
                at.setdefault(e.step, []).append(e.nats)
        steps = sorted(at)
        means = {name: [sum(at[step]) / len(at[step]) for step in steps]}
        plotting.lines(ax, steps, means, xlabel="update", ylabel="held-out nats per byte")
        low, high = ([f(at[step]) for step in steps] for f in (min, max))
        plotting.band(ax, steps, low, high)
    fig.savefig(path)
