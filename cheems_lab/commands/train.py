"""The command `train`: on one process, or on several that torchrun has started."""

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from cheems_lab import options, processes
from cheems_lab.checkpoint import checkpoint_path, newest_checkpoint
from cheems_lab.console import is_first, print_error, print_once, shell_command
from cheems_lab.memory import check_memory, check_text
from cheems_lab.plots import check_plot, plot_run
from cheems_lab.progress import Progress, stopping_on_signals
from cheems_lab.training import CHECKPOINT_EVERY, saved_settings, train
from cheems_ref import text
from cheems_ref.budget import count_parameters
from cheems_ref.model import CausalLM
from cheems_ref.train import TrainConfig, split_text

MANUAL = "manual"  # as the value of --text: Python's own
# What a resumed run finds again, beside the configurations of model and training.
KEPT = dict(text=str, parallel=str, compile=bool, sample_every=int, checkpoint_every=int)


def run(a: argparse.Namespace) -> int:
    """Train, on one process or on several that torchrun has started."""
    world_size, device = processes.started_by_torchrun(), options.device(a)
    if a.parallel and not world_size:
        raise ValueError("--parallel needs several processes: start with torchrun (chapter 11)")
    if world_size > 1 and (a.compile or a.sample_every):
        raise ValueError("--compile and --sample-every are for one process: leave them out")
    saved = saved_settings(a.run)
    if saved is None and not (a.text or a.preset or a.pattern):
        print_error(
            f"there is no run in {a.run} to resume; to start one, give --text FILE, --pattern or "
            f"--preset (--text {MANUAL} is Python's own manual)"
        )
        return 2
    check_plot(a.plot)
    if world_size <= 1:
        return _train(a, saved, device, 1)
    processes.init_processes(device)
    try:
        return _train(a, saved, device, world_size)
    finally:
        dist.destroy_process_group()


def _train(a, saved, device, world_size):
    config, training = _model(a, saved), _training(a, saved)
    kept = _kept(a, saved)
    source, parallel = kept.get("text"), kept.get("parallel", "sharded")
    source_name = source or "Python's own manual"
    print_once(f"training on {source_name}, in {a.run}")
    counts = count_parameters(config).values()
    total, active = sum(c.total for c in counts), sum(c.active for c in counts)
    used = "all active" if total == active else f"{active:,} active per byte"
    print_once(f"{config.pattern}: {total:,} parameters, {used}; {device}")
    size = check_text(source, training, recorded=a.text is None)
    check_memory(config, training, device, world_size, parallel, text_bytes=size)
    ids = text.read_ids(source)
    seen, held_out = (len(part) for part in split_text(ids, training.eval_fraction))
    print_once(
        f"{seen:,} bytes to train on, {held_out:,} held out; "
        f"{training.batch_size * training.seq_len:,} per step, {training.steps} steps"
    )
    torch.manual_seed(training.seed)
    model = CausalLM(config).to(device)
    if world_size > 1:
        processes.shard_model(model, parallel)
        print_once(f"{world_size} processes: {parallel}")
    elif kept.get("compile"):
        model.compile()
    on_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    bar = on_terminal if a.progress_bar is None else a.progress_bar
    samples = kept.get("sample_every") if world_size == 1 else None
    progress = Progress(a.run, samples, lines=not bar)
    try:
        with stopping_on_signals(alone=world_size == 1) as stop_requested:
            run = train(
                model,
                ids,
                training,
                directory=a.run,
                checkpoint_every=kept.get("checkpoint_every", CHECKPOINT_EVERY),
                options=kept,
                progress_bar=bar,
                at_start=progress.on_start,
                after_step=progress.on_step,
                stop_requested=stop_requested,
            )
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
    print_once(f"saved in {checkpoint_path(a.run, run.step)} (the last two checkpoints are kept)")
    if a.plot is not None and is_first():
        plot_run(run, a.plot)
        print_once(f"drawn: {a.plot}")
    print_once(f"next: {shell_command('generate', '--run', a.run, '--prompt', 'Once')}")
    return 0


def _model(a, saved):
    """The model: from the options, and else from the run."""
    if saved is None or a.preset or a.pattern:
        return options.model_config(a)
    config = options.with_fields(saved.model, dict(a.set))
    options.check_used(dict(a.set), config)
    return config


def _training(a, saved):
    """The settings of the training: from the options, and else from the run."""
    given = options.training_options(a)
    if saved is None:
        return TrainConfig(**given)
    before = saved.training
    steps = given.get("steps", before.steps)
    if steps < saved.step:
        raise ValueError(f"--steps {steps} is too few: {saved.step} are done in {a.run}")
    if saved.checkpoint is not None and steps != before.steps:  # the rate keeps its schedule
        given.setdefault("decay_steps", before.decay_steps or before.steps)
    return TrainConfig(**vars(before) | given)


def _kept(a, saved):
    """The other options that a resumed run finds again: from the command, and else from the run."""
    kept = {} if saved is None else dict(saved.options)
    for name, value in kept.items():
        if name not in KEPT or type(value) is not KEPT[name]:
            raise ValueError(
                f"the settings of {a.run} have {name} = {value!r:.40}, of no such kind"
            )
    for name in KEPT:
        if getattr(a, name) is not None:
            kept[name] = getattr(a, name)
    if a.text == MANUAL:
        del kept["text"]
    elif a.text:
        kept["text"] = str(Path(a.text).absolute())
    return kept
