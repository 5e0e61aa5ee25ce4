"""What the commands do: `train` and `generate`, as `arguments` has read them.

A mistake of the user's ends in one line on standard error and status 1, Ctrl-C in status 130.
"""

import codecs
import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from cheems_ref import kernels, shards, text
from cheems_ref.arguments import BYTES, FIELDS, PATTERN, complain
from cheems_ref.budget import count_parameters, training_bytes
from cheems_ref.checkpoint import load_model, newest_checkpoint, read_record
from cheems_ref.config import ModelConfig, preset
from cheems_ref.generate import Sampling, stream
from cheems_ref.model import CausalLM
from cheems_ref.train import (
    TrainConfig,
    default_device,
    evaluate,
    n_micro_batches,
    split_text,
    train,
)
from cheems_ref.watch import Watch, ctrl_c, in_shell, processes, say

try:
    import resource
except ImportError:  # Windows
    resource = None

LONG = 64  # letters of a pattern that are shown
NOTABLE = 10**9  # bytes, from which on memory that cannot be measured is spoken of


def carry_out(parsed) -> int:
    """Do what was asked for, and return the status of the process."""
    return guarded(_train if parsed.name == "train" else _generate, parsed)


def guarded(command, parsed) -> int:
    """Carry out a command, and say in one line what went wrong."""
    try:
        return command(parsed)
    except BrokenPipeError:  # whoever read the output has gone, `head` for one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (MemoryError, RuntimeError) as error:
        return complain(_out_of_memory(error) or _left_alone(error) or error)
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as error:
        return complain(error)
    except KeyboardInterrupt:
        say("\nstopped", file=sys.stderr)
        return 130


def _train(a):
    device, config = _device(a), _model_config(a)
    if a.parallel and not processes():
        raise ValueError(
            f"--parallel {a.parallel} is for several processes: leave it out, or start with "
            "torchrun (README)"
        )
    if processes() > 1:
        shards.begin(device)
        try:
            return _train_here(a, device, config, processes())
        finally:
            shards.end()
    return _train_here(a, device, config, 1)


def _train_here(a, device, config, n_processes):
    training, newest = _train_config(a), newest_checkpoint(a.run)
    counts = count_parameters(config).values()
    n, active = sum(c.total for c in counts), sum(c.active for c in counts)
    say(f"{_short(config.pattern)}: {n:,} parameters, {_at_work(n, active)}; on {device}")
    _must_fit(config, training, device, n, n_processes, a.parallel)
    _warn_of_the_interpreter(config, device)
    ids = text.text_to_ids(text.read_text(a.text), dtype=torch.uint8)
    kept, held_out = (len(part) for part in split_text(ids, training.held_out))
    say(
        f"{kept:,} bytes to train on, {held_out:,} held out; "
        f"{training.batch_size * training.length:,} per update, {training.steps} updates"
    )
    torch.manual_seed(training.seed)
    model = CausalLM(config).to(device)
    if n_processes > 1:
        shards.spread(model, a.parallel or "sharded")
        say(f"spread over {n_processes} processes: {a.parallel or 'sharded'}")
    bar = _shows_a_bar(a.bar)
    watch = Watch(a.run, newest, lines=not bar)
    try:
        with ctrl_c(watch, alone=n_processes == 1):
            run = train(
                model,
                ids,
                training,
                directory=a.run,
                bar=bar,
                at_start=watch.starts,
                after_step=watch.goes_on,
            )
    except KeyboardInterrupt:
        again = in_shell(*a.words) if n_processes == 1 else "the same command"
        say(f"\n{watch.stopped()}\nto go on: {again}", file=sys.stderr)
        return 130
    if run.evaluations and run.evaluations[-1][0] == run.step:
        nats = run.evaluations[-1][1]
    else:  # it was stopped here, and is asked for no more
        nats = evaluate(model, split_text(ids, training.held_out)[1], length=training.length)
    say(
        f"held-out loss {nats:.3f} nats = {nats / math.log(2):.3f} bits per byte; saved in "
        f"{newest_checkpoint(a.run)} (of checkpoints the last two are kept)"
    )
    if nats > 2 * math.log(BYTES):
        say(
            f"that is far worse than a guess, {math.log(BYTES):.3f} nats: training diverged; try a "
            f"smaller --learning-rate than {training.learning_rate:g}, and another --run"
        )
    say(f"next: {in_shell('generate', '--run', a.run, '--prompt', 'Once')}")
    return 0


def _generate(a):
    device = _device(a)
    sampling = Sampling(a.temperature, a.top_k, a.top_p, torch.Generator(device))
    if a.seed is None:
        sampling.generator.seed()
    else:
        sampling.generator.manual_seed(a.seed)
    model = load_model(a.run, device=device).eval()
    prompt = text.text_to_ids(a.prompt)[None].to(device)
    _must_have_positions(model.config, prompt.shape[1], a.max_new_tokens)
    tokens = stream(model, prompt, a.max_new_tokens, sampling)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a letter may take 4 bytes
    sys.stdout.write(a.prompt)
    for token in tokens:
        sys.stdout.write(decoder.decode(bytes(token.tolist())))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    sys.stdout.flush()
    return 0


# --- what is asked for ------------------------------------------------------------------------


def _model_config(a):
    base = preset(a.preset) if a.preset else ModelConfig(pattern=a.pattern or PATTERN)
    config = dataclasses.replace(base, **{"vocab_size": BYTES, **a.set})
    check_fields_are_used(a.set, config)
    return config


def check_fields_are_used(
    names: Iterable[str], *configs: ModelConfig, option: str = "--set"
) -> None:
    """Refuse a field that none of these models uses.

    Args:
        names: of the fields that were given.
        configs: the models that they were given for.
        option: where they were given, for the message.
    """
    for name in names:
        field = FIELDS.get(name)  # vocab_size is not listed: every model uses it
        if field is not None and not any(field.is_used(config) for config in configs):
            patterns = ", ".join(dict.fromkeys(_short(config.pattern) for config in configs))
            raise ValueError(
                f"{option} {name} has no effect on {patterns}: it is for {field.users()}"
            )


def _train_config(a):
    """The settings of a run. Of those that change no loss the ones not given are as they were."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    given = {k: v for k, v in vars(a).items() if k in names and v is not None}
    if (newest := newest_checkpoint(a.run)) is None:
        return TrainConfig(**given)
    record = read_record(newest)
    before, done = record.get("training", {}), record.get("step", 0)
    for name in ("steps", "evaluate_every", "checkpoint_every"):
        if name in before:
            given.setdefault(name, before[name])
    if given["steps"] < done:
        raise ValueError(
            f"--steps {given['steps']} is too few: {done} updates are done in {a.run}; without "
            "--steps it is the run's own number"
        )
    schedule = before.get("schedule")
    if given["steps"] != before.get("steps"):
        schedule = schedule or before.get("steps")
    given.setdefault("schedule", schedule)
    return TrainConfig(**given)


def _device(a):
    kind = default_device().type if a.device is None else a.device
    if kind == "cuda" and processes() > 1:
        a.device = f"cuda:{os.environ['LOCAL_RANK']}"  # one for each
    elif a.device is None:
        return torch.device(kind)
    there = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        there += [kind, *(f"{kind}:{i}" for i in range(torch.accelerator.device_count()))]
    if a.device not in there:
        raise ValueError(f"--device {a.device} cannot be used here; there is {', '.join(there)}")
    return torch.device(a.device)


def _shows_a_bar(told):
    """As told; else where both outputs are a terminal that has columns to draw it in."""
    if told is not None or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return bool(told)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # a terminal that does not say
        return True


# --- what cannot go well ----------------------------------------------------------------------


def _must_fit(config, training, device, parameters, processes=1, parallel=None):
    """Refuse what needs more memory than there is, before any of it is taken."""
    share = math.ceil(training.batch_size / processes)
    windows = math.ceil(share / n_micro_batches(training, processes))  # of a micro-batch
    tokens = windows * training.length
    if parallel == "data":
        needed = training_bytes(config, tokens=tokens)
    else:
        needed = training_bytes(config, tokens=processes * tokens, processes=processes)
    if device.type == "cpu":  # whose memory its processes share
        needed *= processes
    there = _memory(device)
    said = (
        f"training takes at least {_gigabytes(needed)} of memory (16 bytes for each of "
        f"{parameters:,} parameters, 8 for each logit of {windows:,} windows at a time)"
    )
    if there is None and needed >= NOTABLE:
        say(f"{said}; how much {device} has cannot be seen here")
    if there is not None and needed > there:
        raise ValueError(
            f"{said}, and {device} has {_gigabytes(there)}: take a smaller model, --micro-batch "
            "or --batch-size"
        )
    if config.mask == "gate" and "I" in config.pattern and training.length > config.max_positions:
        raise ValueError(
            f"--length {training.length} is longer than the table of mask=gate, max_positions = "
            f"{config.max_positions}"
        )


def _memory(device):
    """How many bytes a process may take on a device; None if that cannot be seen."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if device.type != "cpu":
        return None
    limits = []
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if resource is not None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) > 0:
        limits.append(limit)
    with contextlib.suppress(OSError, ValueError):  # of a container; a word if there is none
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits, default=None)


def _warn_of_the_interpreter(config, device):
    if config.backend == "kernel" and "S" in config.pattern and device.type == "cpu":
        status = kernels.kernel_status()
        if status.mode == "interpreter":
            say(
                "backend=kernel: without a GPU the kernels run in Triton's interpreter, where an "
                "update can take minutes; --set backend=auto takes the fast form"
            )


def _must_have_positions(config, read, written):
    """Refuse to write past the table of mask="gate"; the last byte is written and not read."""
    if config.mask != "gate" or "I" not in config.pattern or written == 0:
        return
    most = config.max_positions - read + 1
    if written > most:
        way = f"--max-new-tokens may be at most {most}" if most > 0 else "take a shorter --prompt"
        raise ValueError(
            f"--prompt and --max-new-tokens are {read} + {written} bytes, more than the table of "
            f"mask=gate takes, max_positions = {config.max_positions}: {way}"
        )


def _left_alone(error):
    """What to say of an error if it is that another process has ended."""
    lost = ("Connection closed", "Connection reset", "Read error", "connectFullMesh")
    if processes() > 1 and any(word in str(error) for word in lost):
        return "another process has ended; what it said stands above, or comes"
    return None


def _out_of_memory(error):
    """What to say of an error if it is one of memory."""
    is_one = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_one or "DefaultCPUAllocator" in str(error):
        return (
            "there is not enough memory: take a smaller model, --batch-size, --micro-batch or "
            "--length"
        )
    return None


# --- what is said -----------------------------------------------------------------------------


def _at_work(parameters, active):
    if parameters == active:
        return "all of them at work on every byte"
    return f"{active:,} of them at work on a byte (of experts, those that it chooses)"


def _short(pattern):
    if len(pattern) <= LONG:
        return pattern
    return f"{pattern[:LONG]}... ({len(pattern):,} layers)"


def _gigabytes(n):
    return f"{n / 1e9:,.1f} GB"
