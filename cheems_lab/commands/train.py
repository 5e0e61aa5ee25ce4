"""Train a language model on a text, byte by byte.

The model is a preset, or a pattern of letters, one for each layer:
{letters}

examples:
  cheems train --text book.txt --run runs/book
  cheems train --run runs/book                        (resumes it)
  cheems train --run runs/book --steps 2000           (trains it longer)
  cheems train --text book.txt --run runs/llama --pattern "AM x 4" --steps 500
  cheems train --text book.txt --run runs/big --set d_model=256 --set d_ff=512
  cheems train --run runs/manual                      (Python's own manual as the text)

Stop it at any time: Ctrl-C, SIGTERM and SIGHUP save a checkpoint first, and whatever else happens
the last two are there. A resumed run takes the options that you don't give from its directory, and
reaches the same losses as a run that was never stopped. With a larger --steps it trains longer, and
the learning rate stays at the end of its schedule. An option that would change a loss is rejected.

The directory also holds losses.csv: step, loss, and the held-out loss where it was evaluated.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

import torch

from cheems_lab import options, processes
from cheems_lab.checkpoint import newest_checkpoint, read_record
from cheems_lab.console import print_once, shell_command, short
from cheems_lab.memory import check_memory
from cheems_lab.options import BYTES
from cheems_lab.progress import LossLog, Progress, Samples, shows_bar, stopping_on_signals
from cheems_lab.training import train
from cheems_ref import kernels, text
from cheems_ref.budget import count_parameters
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.train import TrainConfig, evaluate, split_text

MANUAL = "Python's own manual"
OPTIONS = "options.json"  # what a resumed run takes from its directory


def add_options(commands) -> None:
    """Add the command to a parser."""
    text = __doc__.format(letters=options.letters())
    add = options.add_command(commands, "train", run, text, epilog=options.fields())
    add("--text", type=options.nonempty, metavar="FILE",
        help="UTF-8 text; without it, Python's own manual")  # fmt: skip
    options.add_run(add, "where checkpoints and losses are kept")
    options.add_model(add)
    options.add_training(add)
    add("--decay-steps", type=options.at_least(1), metavar="STEPS",
        help="in which the learning rate rises and falls (default: --steps)")  # fmt: skip
    add("--seed", type=options.seed, help="of the weights and the windows (default 0)")
    add("--parallel", choices=["sharded", "data"],
        help="with torchrun: shard the parameters (default), or copy them")  # fmt: skip
    add("--compile", action="store_true", help="compile the model with torch.compile")
    add("--sample-every", type=options.at_least(1), metavar="STEPS",
        help="print a text that the model generates")  # fmt: skip
    add("--progress-bar", action=argparse.BooleanOptionalAction,
        help="progress bar (default: on a terminal); without it, lines")  # fmt: skip


def run(a: argparse.Namespace) -> int:
    """Train, on one process or on those that torchrun has started."""
    world_size, device = processes.started_by_torchrun(), options.device(a)
    if a.parallel and not world_size:
        raise ValueError(
            f"--parallel {a.parallel} is for several processes: leave it out, or start with "
            "torchrun (README)"
        )
    if world_size > 1 and (a.compile or a.sample_every):
        raise ValueError("--compile and --sample-every are for one process: leave them out")
    if world_size <= 1:
        return _train(a, device, 1)
    processes.init_processes(device)
    try:
        return _train(a, device, world_size)
    finally:
        processes.destroy_processes()


def _train(a, device, world_size):
    newest = newest_checkpoint(a.run)
    config, training, source = _settings(a, newest)
    print_once(f"training on {source or MANUAL}, in {a.run}")
    counts = count_parameters(config).values()
    total, active = sum(c.total for c in counts), sum(c.active for c in counts)
    print_once(f"{short(config.pattern)}: {total:,} parameters, {_active(total, active)}; {device}")
    check_memory(config, training, device, world_size, a.parallel)
    _warn_of_interpreter(config, device)
    ids = text.text_to_ids(text.read_text(source), dtype=torch.uint8)
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

    progress_bar = shows_bar(a.progress_bar)
    progress = Progress(a.run, newest, lines=not progress_bar)
    callbacks = [LossLog(a.run), *([Samples(a.sample_every)] if a.sample_every else []), progress]

    def at_start(run):
        if processes.is_first():
            _keep_settings(a.run, config, training, source)
        for callback in callbacks:
            callback.on_start(run)

    def after_step(run):
        for callback in callbacks:
            callback.on_step(run)

    try:
        with stopping_on_signals(progress, alone=world_size == 1):
            hooks = dict(progress_bar=progress_bar, at_start=at_start, after_step=after_step)
            run = train(model, ids, training, directory=a.run, **hooks)
    except KeyboardInterrupt:
        again = shell_command("train", "--run", a.run) if world_size == 1 else "the same command"
        print_once(f"\n{progress.summary()}\nto resume: {again}", file=sys.stderr)
        return 130
    _report(a, run, ids)
    return 0


def _report(a, run, ids):
    training = run.config
    if run.evaluations and run.evaluations[-1][0] == run.step:
        nats = run.evaluations[-1][1]
    else:  # it was stopped here, and now asked for no further step
        held_out = split_text(ids, training.eval_fraction)[1]
        nats = evaluate(run.model, held_out, seq_len=training.seq_len)
    print_once(
        f"held-out loss {nats:.3f} nats = {nats / math.log(2):.3f} bits per byte; saved in "
        f"{newest_checkpoint(a.run)} (the last two checkpoints are kept)"
    )
    if nats > 2 * math.log(BYTES):
        print_once(
            f"a uniform guess has {math.log(BYTES):.3f} nats: training diverged; try a smaller "
            f"--learning-rate than {training.learning_rate:g}, and another --run"
        )
    print_once(f"next: {shell_command('generate', '--run', a.run, '--prompt', 'Once')}")


# --- settings -------------------------------------------------------------------------------------


def _settings(a, newest):
    """The model, the training and the text: as given, and where not given as the run has them."""
    path, before = Path(a.run) / OPTIONS, {}
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it") from error
    if newest is not None:  # what it says is sealed, and cannot have been edited
        record = read_record(newest)
        before |= {"model": record["model"], "training": record["training"]}
    given, done = options.training_options(a), 0 if newest is None else record["step"]
    training = dict(before.get("training", {}))
    if training:
        training["betas"] = tuple(training["betas"])  # JSON has lists
    steps = given.get("steps", training.get("steps"))
    if newest is not None:
        if steps < done:
            raise ValueError(
                f"--steps {steps} is too few: {done} steps are done in {a.run}; leave it out to "
                "take the run's own number"
            )
        if steps != training["steps"]:  # trained longer: the learning rate keeps its schedule
            given.setdefault("decay_steps", training["decay_steps"] or training["steps"])
    config = _model_config(a, before.get("model"))
    source = a.text or before.get("text")
    return config, TrainConfig(**training | given), source and str(Path(source).absolute())


def _model_config(a, before):
    if before is None or a.preset or a.pattern:
        return options.model_config(a)
    config = options.with_fields(ModelConfig(**before), dict(a.set))
    options.check_used(dict(a.set), config)
    return config


def _keep_settings(directory, config, training, source):
    settings = dict(
        text=source, model=dataclasses.asdict(config), training=dataclasses.asdict(training)
    )
    path = Path(directory) / OPTIONS
    partial = path.with_name(f"partial-{path.name}")
    partial.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _active(total, active):
    return "all active" if total == active else f"{active:,} active per byte"


def _warn_of_interpreter(config, device):
    asked = config.backend == "kernel" and "S" in config.pattern and device.type == "cpu"
    if asked and kernels.kernel_status().mode == "interpreter":
        print_once(
            "backend=kernel: without a GPU the kernels run in Triton's interpreter, where a step "
            "can take minutes; --set backend=auto takes the fast form"
        )
