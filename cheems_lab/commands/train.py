"""The command `train`: on one process, or on several that torchrun has started."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from cheems_lab import options, processes
from cheems_lab.checkpoint import newest_checkpoint, read_record
from cheems_lab.console import is_first, print_once, shell_command
from cheems_lab.memory import check_memory, check_text
from cheems_lab.plots import check_plot, plot_run
from cheems_lab.progress import Progress, stopping_on_signals
from cheems_lab.training import train, write_json
from cheems_ref import text
from cheems_ref.budget import count_parameters
from cheems_ref.config import from_saved
from cheems_ref.model import CausalLM
from cheems_ref.train import TrainConfig, split_text

MANUAL = "Python's own manual"
OPTIONS = "options.json"  # for a resumed run


def run(a: argparse.Namespace) -> int:
    """Train, on one process or on several that torchrun has started."""
    world_size, device = processes.started_by_torchrun(), options.device(a)
    if a.parallel and not world_size:
        raise ValueError("--parallel needs several processes: start with torchrun (chapter 12)")
    if world_size > 1 and (a.compile or a.sample_every):
        raise ValueError("--compile and --sample-every are for one process: leave them out")
    for name in ("parallel",) if world_size > 1 else ("compile", "sample_every"):
        setattr(a, name, getattr(a, name) or _saved(a.run).get(name))
    check_plot(a.plot)
    if world_size <= 1:
        return _train(a, device, 1)
    processes.init_processes(device)
    try:
        return _train(a, device, world_size)
    finally:
        dist.destroy_process_group()


def _train(a, device, world_size):
    newest = newest_checkpoint(a.run)
    config, training, source = _settings(a, newest)
    print_once(f"training on {source or MANUAL}, in {a.run}")
    counts = count_parameters(config).values()
    total, active = sum(c.total for c in counts), sum(c.active for c in counts)
    used = "all active" if total == active else f"{active:,} active per byte"
    print_once(f"{config.pattern}: {total:,} parameters, {used}; {device}")
    size = check_text(source, training, recorded=a.text is None)
    check_memory(config, training, device, world_size, a.parallel, text_bytes=size)
    ids = text.read_ids(source)
    kept, held_out = (len(part) for part in split_text(ids, training.eval_fraction))
    print_once(
        f"{kept:,} bytes to train on, {held_out:,} held out; "
        f"{training.batch_size * training.seq_len:,} per step, {training.steps} steps"
    )
    torch.manual_seed(training.seed)
    model = CausalLM(config).to(device)
    if world_size > 1:
        processes.shard_model(model, a.parallel or "sharded")
        print_once(f"{world_size} processes: {a.parallel or 'sharded'}")
    if a.compile:
        model.compile()
    on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    bar = on_terminal if a.progress_bar is None else a.progress_bar
    with stopping_on_signals(alone=world_size == 1) as stop_requested:
        progress = Progress(a.run, newest, stop_requested, a.sample_every, lines=not bar)

        def at_start(run):
            if is_first():
                settings = dict(text=source, model=asdict(config), training=asdict(training))
                how = {
                    k: v for k in ("parallel", "compile", "sample_every") if (v := getattr(a, k))
                }
                write_json(a.run / OPTIONS, _saved(a.run) | settings | how)
            progress.on_start(run)

        try:
            hooks = dict(progress_bar=bar, at_start=at_start, after_step=progress.on_step)
            run = train(model, ids, training, directory=a.run, **hooks)
        except KeyboardInterrupt:
            last = newest_checkpoint(a.run) or "not there yet"
            print_once(f"\nstopped; the last checkpoint is {last}", file=sys.stderr)
            again = shell_command("train", "--run", a.run)
            print_once(f"to resume: {again}", file=sys.stderr)
            return 130
    if run.evaluations:
        step, nats = run.evaluations[-1]
        bits = nats / math.log(2)
        print_once(f"held-out loss {nats:.3f} nats = {bits:.3f} bits per byte after step {step}")
    print_once(f"saved in {newest_checkpoint(a.run)} (the last two checkpoints are kept)")
    if a.plot is not None and is_first():
        plot_run(run, a.plot)
        print_once(f"drawn: {a.plot}")
    print_once(f"next: {shell_command('generate', '--run', a.run, '--prompt', 'Once')}")
    return 0


def _saved(directory):
    """The options of the run in a directory, empty before its first step."""
    path = directory / OPTIONS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _settings(a, newest):
    """The model, the training and the text: from the options, and else from the run."""
    before = _saved(a.run)
    if newest is not None:
        record = read_record(newest)
        before |= {"model": record["model"], "training": record["training"]}
    given, training = options.training_options(a), before.get("training", {})
    steps = given.get("steps", training.get("steps"))
    if newest is not None and steps < record["step"]:
        raise ValueError(f"--steps {steps} is too few: {record['step']} are done in {a.run}")
    if newest is not None and steps != training["steps"]:  # the learning rate keeps its schedule
        given.setdefault("decay_steps", training["decay_steps"] or training["steps"])
    if "model" not in before or a.preset or a.pattern:
        config = options.model_config(a)
    else:
        config = options.with_fields(from_saved(before["model"]), dict(a.set))
        options.check_used(dict(a.set), config)
    source = a.text or before.get("text")
    return config, TrainConfig(**training | given), source and str(Path(source).absolute())
