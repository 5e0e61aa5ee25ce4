"""Compare models, with intervals over seeds.

All rows are trained on the same windows in the same order, with several seeds. The table has the
held-out loss in nats per byte with Student's 95 % interval over the seeds, and the difference to
the first row, taken seed by seed. A difference is claimed only where Holm's rule calls it, a rule
that corrects for the number of rows.

A row is NAME=PATTERN, then fields of the model (see "train --help") and learning_rate:
  cheems compare --run runs/s --row conv=SM,position=conv --row rope=SM --seeds 5

The same command resumes after a stop, and you can add rows and seeds; an option that would change
the loss of a finished row is rejected. Each evaluation is a line, and the table comes at the end;
comparison.json keeps the evaluations of finished runs.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cheems_lab import console, options
from cheems_lab.comparison import Evaluation, Row, check_name, compare, last_losses
from cheems_lab.console import print_once, shell_command
from cheems_lab.memory import check_memory
from cheems_lab.progress import stopping_on_signals
from cheems_lab.training import CHECKPOINT_EVERY
from cheems_ref.budget import count_parameters
from cheems_ref.compare import Interval, Verdict, interval, verdicts
from cheems_ref.config import ModelConfig
from cheems_ref.text import Corpus, read_corpus, read_text, text_to_ids
from cheems_ref.train import TrainConfig


def add_options(commands) -> None:
    """Add the command to a parser."""
    add = options.add_command(commands, "compare", run, __doc__)
    add("--row", type=_row, action="append", required=True, metavar="NAME=PATTERN,...",
        help="see above")  # fmt: skip
    options.add_run(add, "where evaluations are kept")
    add("--text", type=options.nonempty, metavar="FILE or DIRECTORY",
        help="UTF-8; of a directory some files are held out whole (default: Python's manual and "
        "standard library)")  # fmt: skip
    add("--seeds", type=options.at_least(1), default=3, help="runs per row (default %(default)s)")
    add("--set", type=options.setting, action="append", default=[], metavar="NAME=VALUE",
        help="a field of all rows")  # fmt: skip
    options.add_training(add)
    add("--plot", type=options.nonempty, metavar="FILE", help="draw held-out loss against steps")


def run(a: argparse.Namespace) -> int:
    """Compare, and print the table."""
    device, seeds = options.device(a), range(a.seeds)
    rows = {}
    for name, fields in a.row:
        if name in rows:
            raise ValueError(f"--row {name} is given twice")
        rows[name] = _model(name, fields, dict(a.set))
    options.check_used(dict(a.set), *(row.config for row in rows.values()))
    config = TrainConfig(**options.training_options(a))
    for row in rows.values():
        check_memory(row.config, config, device)
    corpus = _corpus(a.text, config.eval_fraction)
    config = dataclasses.replace(config, eval_fraction=corpus.eval_fraction)
    kept, apart = corpus.texts
    print_once(
        f"{len(corpus.ids):,} bytes, {kept} texts to train on and {apart} held out; "
        f"{len(rows)} rows, {a.seeds} seeds, {config.steps} steps of "
        f"{config.batch_size * config.seq_len:,} bytes; on {device}; in {a.run}"
    )
    try:
        with stopping_on_signals() as stop_requested:

            def after_step(name, run):
                if run.is_due(config.evaluate_every):
                    nats, done = run.evaluations[-1][1], f"{run.step} of {config.steps} steps"
                    print_once(
                        f"{name}, seed {run.config.seed}: held out {nats:.3f} nats after {done}"
                    )

            evaluations = compare(
                rows,
                corpus.ids,
                config,
                seeds=seeds,
                directory=a.run,
                device=device,
                checkpoint_every=a.checkpoint_every or CHECKPOINT_EVERY,
                after_step=after_step,
                stop_requested=stop_requested,
            )
    except KeyboardInterrupt:
        print_once(f"\nstopped; to resume: {shell_command(*a.words)}", file=sys.stderr)
        return 130
    print_once(table(rows, evaluations))
    if a.plot is not None:
        _plot(rows, evaluations, a.plot)
        print_once(f"drawn: {a.plot}")
    return 0


def _row(word):
    """The type of --row."""
    name, _, rest = word.partition("=")
    pattern, *fields = rest.split(",")
    if not (name and pattern):
        raise argparse.ArgumentTypeError(f"takes NAME=PATTERN,FIELD=VALUE,..., {word!r} is not")
    try:
        check_name(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return name, {"pattern": pattern} | dict(map(_field, fields))


def _field(word):
    name, _, value = word.partition("=")
    return (name, float(value)) if name == "learning_rate" else options.setting(word)


def _model(name, fields, common):
    fields, option = dict(fields), f"--row {name}:"
    rate = fields.pop("learning_rate", None)
    try:
        config = options.with_fields(ModelConfig(fields["pattern"]), common | fields)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{option} {error}") from error
    options.check_used(fields, config, option=option)
    return Row(config, rate)


def table(rows: Mapping[str, Row], evaluations: Sequence[Evaluation]) -> str:
    """Return a table of a finished comparison: parameters, losses, differences to the first row.

    Args:
        rows, evaluations: of `compare`.
    """
    losses, baseline = last_losses(evaluations), next(iter(rows))
    judged = verdicts(losses, {name: {name: 1, baseline: -1} for name in rows if name != baseline})
    lines = [("row", "parameters", "active", "held-out nats", "each seed", f"minus {baseline}")]
    for name, row in rows.items():
        counts = count_parameters(row.config).values()
        total, active = (sum(getattr(c, kind) for c in counts) for kind in ("total", "active"))
        each = " ".join(f"{nats:.3f}" for nats in losses[name].values())
        mean = _shown(interval([*losses[name].values()]))
        apart = "" if name == baseline else _verdict(judged[name])
        lines.append((name, f"{total:,}", f"{active:,}", mean, each, apart))
    return console.table(lines, left=6)


def _shown(number: Interval, sign=""):
    width = "" if math.isinf(number.half_width) else f" ± {number.half_width:.3f}"
    return f"{number.mean:{sign}.3f}{width}"


def _verdict(apart: Verdict):
    words = "a difference" if apart.called else "no difference shown"
    words = "one seed tells nothing" if math.isinf(apart.interval.half_width) else words
    return f"{_shown(apart.interval, '+')}  {words}"


def _corpus(path, eval_fraction):
    """A file is cut near its end; of many texts some are held out whole."""
    if path is None or Path(path).is_dir():
        return read_corpus(path, eval_fraction=eval_fraction)
    return Corpus(text_to_ids(read_text(path), dtype=torch.uint8), eval_fraction, (1, 1))


def _plot(rows, evaluations, path):
    """Held-out loss against steps: a line through the means, a band from lowest to highest."""
    from cheems_ref import plotting

    fig, ax = plotting.figure(size=(7, 4.5))
    for name in rows:
        at = {}
        for e in evaluations:
            if e.row == name:
                at.setdefault(e.step, []).append(e.nats)
        steps = sorted(at)
        means = {name: [sum(at[step]) / len(at[step]) for step in steps]}
        plotting.lines(ax, steps, means, xlabel="step", ylabel="held-out nats per byte")
        plotting.band(ax, steps, *([f(at[step]) for step in steps] for f in (min, max)))
    fig.savefig(path)
