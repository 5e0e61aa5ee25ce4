"""The command `compare`: models trained alike, with intervals over seeds."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cheems_lab import console, options
from cheems_lab.comparison import Evaluation, Row, compare, last_losses
from cheems_lab.console import print_once, shell_command
from cheems_lab.memory import check_memory, check_text
from cheems_lab.plots import check_plot, plot_comparison
from cheems_lab.progress import stopping_on_signals
from cheems_lab.training import CHECKPOINT_EVERY
from cheems_ref.budget import count_parameters
from cheems_ref.compare import Interval, Verdict, interval, verdicts
from cheems_ref.config import ModelConfig
from cheems_ref.text import Corpus, read_corpus, read_ids
from cheems_ref.train import TrainConfig


def run(a: argparse.Namespace) -> int:
    """Compare, and print the table."""
    device, seeds = options.device(a), range(a.seeds)
    rows = {}
    for row in a.row:
        if row.name in rows:
            raise ValueError(f"--row {row.name} is given twice")
        rows[row.name] = _model(row, dict(a.set))
    options.check_used(dict(a.set), *(row.config for row in rows.values()))
    config = TrainConfig(**options.training_options(a))
    check_plot(a.plot)
    size = check_text(a.text, config)
    for row in rows.values():
        check_memory(row.config, config, device, text_bytes=size)
    log = sys.stderr if a.json else None  # of everything but the result
    corpus = _corpus(a.text, config.eval_fraction)
    config = dataclasses.replace(config, eval_fraction=corpus.eval_fraction)
    kept, apart = corpus.texts
    print_once(
        f"{len(corpus.ids):,} bytes, {kept} texts to train on and {apart} held out; "
        f"{len(rows)} rows, {a.seeds} seeds, {config.steps} steps of "
        f"{config.batch_size * config.seq_len:,} bytes; on {device}; in {a.run}",
        file=log,
    )
    try:
        with stopping_on_signals() as stop_requested:

            def after_step(name, run):
                if run.is_due(config.evaluate_every):
                    nats, done = run.evaluations[-1][1], f"{run.step} of {config.steps} steps"
                    line = f"{name}, seed {run.config.seed}: held out {nats:.3f} nats after {done}"
                    print_once(line, file=log)

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
    if a.json:
        print_once(json.dumps(as_json(rows, evaluations), indent=1))
    else:
        print_once(table(rows, evaluations))
    if a.plot is not None:
        plot_comparison(rows, evaluations, a.plot)
        print_once(f"drawn: {a.plot}", file=log)
    return 0


def _model(row, common):
    option = f"--row {row.name}:"
    try:
        config = options.with_fields(ModelConfig(row.fields["pattern"]), common | row.fields)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{option} {error}") from error
    options.check_used(row.fields, config, option=option)
    return Row(config, row.learning_rate)


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


def as_json(rows: Mapping[str, Row], evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Return the numbers of `table` and the evaluations, in lists and dicts.

    A half width of an interval is None for a single seed.

    Args:
        rows, evaluations: of `compare`.
    """
    losses, baseline = last_losses(evaluations), next(iter(rows))
    judged = verdicts(losses, {name: {name: 1, baseline: -1} for name in rows if name != baseline})
    found = {}
    for name, row in rows.items():
        counts = count_parameters(row.config).values()
        found[name] = {
            "pattern": row.config.pattern,
            "parameters": sum(c.total for c in counts),
            "active": sum(c.active for c in counts),
            "held_out": _interval_json(interval([*losses[name].values()])),
            "by_seed": losses[name],
        }
        if name != baseline:
            apart = judged[name]
            found[name]["minus_baseline"] = _interval_json(apart.interval) | {
                "p_value": apart.p_value if math.isfinite(apart.interval.half_width) else None,
                "called": apart.called,
            }
    steps = [dict(zip(Evaluation._fields, e, strict=True)) for e in evaluations]
    return {"baseline": baseline, "rows": found, "evaluations": steps}


def _interval_json(number):
    half = number.half_width
    return {"mean": number.mean, "half_width": half if math.isfinite(half) else None}


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
    return Corpus(read_ids(path), eval_fraction, (1, 1))
