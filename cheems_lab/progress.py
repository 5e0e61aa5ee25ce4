"""Progress messages of a training run, its losses.csv, and its signal handlers.

With several processes only the first prints, and all of them stop after the same step.
"""

import contextlib
import datetime
import os
import signal
import threading
import time
from pathlib import Path

import torch

from cheems_lab.checkpoint import checkpoint_path
from cheems_lab.console import is_first, print_once
from cheems_lab.files import append_text, write_text
from cheems_ref.model import Sampling, generate
from cheems_ref.text import ids_to_text
from cheems_ref.train import Run

LOG_INTERVAL = 30  # seconds between two lines of a run without a progress bar
SAMPLE_LENGTH = 200  # bytes, if the windows of the run are as long
# A terminal's Ctrl-C; a cluster's notice that time is up; a terminal that is closed.
STOPPING = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")]


class Progress:
    """Callbacks of a run: its messages and its losses.csv.

    Args:
        directory: of the run.
        sample_every: steps between two texts that the model generates; None or 0 for no texts.
        lines: whether to print a line from time to time, instead of a progress bar.
    """

    def __init__(self, directory: Path, sample_every: int | None = None, *, lines: bool):
        self.directory, self.lines, self.sample_every = directory, lines, sample_every

    def on_start(self, run: Run) -> None:
        """Print where the run resumes, and begin its losses.csv anew."""
        self.first_step = run.step
        self.began = self.last_line_at = time.monotonic()
        held_out = dict(run.evaluations)
        rows = (_row(step, loss, held_out) for step, loss in enumerate(run.losses, 1))
        if is_first():
            write_text(self.directory / "losses.csv", "".join(["step,loss,held_out\n", *rows]))
        if run.step == 0:
            return
        done, steps = run.step, run.config.steps
        if done < steps:
            newest = checkpoint_path(self.directory, done)
            print_once(f"resuming from {newest}, after {done} of {steps} steps")
        else:
            print_once(f"{self.directory} is finished: {done} steps are done; --steps N trains on")

    def on_step(self, run: Run) -> None:
        """Note the loss, and print a line or a text when due."""
        if is_first():
            row = _row(run.step, run.losses[-1], dict(run.evaluations[-1:]))
            append_text(self.directory / "losses.csv", row)
        now = time.monotonic()
        if first := run.step == self.first_step + 1:
            self.began = now  # the first step takes longer than the others
        evaluated = bool(run.evaluations) and run.evaluations[-1][0] == run.step
        if self.lines and (evaluated or first or now - self.last_line_at >= LOG_INTERVAL):
            self.last_line_at = now
            print_once(self._line(run, now - self.began, evaluated))
        if self.sample_every and run.is_due(self.sample_every):
            print_once(f"--- step {run.step}\n{_sample(run)}\n---")

    def _line(self, run, seconds, evaluated):
        config, done = run.config, run.step - self.first_step - 1
        held_out = f", held out {run.evaluations[-1][1]:.3f}" if evaluated else ""
        line = f"step {run.step} of {config.steps}: loss {run.losses[-1]:.3f}{held_out} nats"
        if done == 0 or seconds <= 0:
            return line
        speed = done * config.batch_size * config.seq_len / seconds
        left = datetime.timedelta(seconds=round((config.steps - run.step) * seconds / done))
        return f"{line}; {speed:,.0f} bytes/s, about {left} to go"


def _row(step, loss, held_out):
    return f"{step},{loss:.6g},{f'{held_out[step]:.6g}' if step in held_out else ''}\n"


def _sample(run):
    """Generate a text from a fixed seed; the random state of the run is unchanged."""
    device = run.model.embedding.weight.device
    sampling = Sampling(0.8, generator=torch.Generator(device).manual_seed(0))
    prompt = torch.tensor([[10]], device=device)  # a new line
    length = min(SAMPLE_LENGTH, run.config.seq_len)
    return ids_to_text(generate(run.model, prompt, length, sampling)[0])


@contextlib.contextmanager
def stopping_on_signals(*, alone: bool = True):
    """Yield a function that says whether a signal has requested a stop; a second one stops at once.

    One of several processes (not alone) may receive a signal twice, from the terminal and from
    torchrun, which kills all processes that have not stopped within 30 seconds.
    """
    requested = threading.Event()

    def handle(*_):
        if requested.is_set() and alone:
            raise KeyboardInterrupt
        requested.set()
        again = b"; Ctrl-C again stops at once" if alone else b", if it ends within 30 seconds"
        with contextlib.suppress(OSError):  # print may be what was interrupted
            os.write(2, b"\nstopping after this step" + again + b"\n" if is_first() else b"")

    before = {}
    for number in STOPPING:
        found = signal.getsignal(number)
        if found in (signal.default_int_handler, signal.SIG_DFL):  # else ignored, as by nohup
            before[number] = found
            signal.signal(number, handle)
    try:
        yield requested.is_set
    finally:
        for number, found in before.items():
            signal.signal(number, found)
