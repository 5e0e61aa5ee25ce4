"""Progress messages of a training run, and its signal handlers.

With several processes only the first prints, and all of them stop after the same step.
"""

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from cheems_lab.checkpoint import newest_checkpoint, save
from cheems_lab.console import print_once
from cheems_lab.processes import any_rank, is_first
from cheems_ref.model import Sampling, generate
from cheems_ref.text import ids_to_text

LOG_INTERVAL = 30  # seconds between two lines of a run without a progress bar
# A terminal's Ctrl-C; a cluster's notice that time is up; a terminal that is closed.
STOPPING = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP")]


class Progress:
    """Callbacks of a run: its messages, and its orderly end when a signal asks for one."""

    def __init__(self, directory, newest, *, lines):
        self.directory, self.newest, self.lines = directory, newest, lines
        self.run, self.stop_requested = None, False

    def on_start(self, run):
        self.run, self.first_step = run, run.step
        self.began = self.last_line_at = time.monotonic()
        if self.newest is None:
            return
        steps, schedule = run.config.steps, run.config.decay_steps
        if run.step >= steps:
            print_once(f"{self.directory} is finished: {steps} steps are done; --steps N trains on")
            return
        print_once(f"resuming from {self.newest}, after {run.step} of {steps} steps")
        if schedule is not None and schedule < steps:
            print_once(
                f"the learning rate keeps its schedule of {schedule} steps and stays at its end; "
                f"another --run has one of {steps}"
            )

    def on_step(self, run):
        now = time.monotonic()
        if first := run.step == self.first_step + 1:
            self.began = now  # the first step takes longer than the others
        evaluated = bool(run.evaluations) and run.evaluations[-1][0] == run.step
        if self.lines and (evaluated or first or now - self.last_line_at >= LOG_INTERVAL):
            self.last_line_at = now
            print_once(self._line(run, now - self.began, evaluated))
        if any_rank(self.stop_requested, run.model) and run.step < run.config.steps:
            save(run, self.directory)
            raise KeyboardInterrupt

    def summary(self):
        """Return where the run stopped, and what is saved of it."""
        newest = newest_checkpoint(self.directory)
        saved = f"the last checkpoint is {newest}" if newest else "no checkpoint was written yet"
        done = "before the first step"
        if self.run is not None:
            done = f"after step {self.run.step} of {self.run.config.steps}"
        return f"stopped {done}; {saved}"

    def _line(self, run, seconds, evaluated):
        done, config = run.step - self.first_step - 1, run.config
        held_out = f", held out {run.evaluations[-1][1]:.3f}" if evaluated else ""
        line = f"step {run.step} of {config.steps}: loss {run.losses[-1]:.3f}{held_out} nats"
        if done == 0 or seconds <= 0:
            return line
        speed = done * config.batch_size * config.seq_len / seconds
        left = datetime.timedelta(seconds=round((config.steps - run.step) * seconds / done))
        return f"{line}; {speed:,.0f} bytes/s, about {left} to go"


@contextlib.contextmanager
def stopping_on_signals(progress, *, alone=True):
    """Let the first signal request an orderly stop; the second one stops at once.

    One of several processes (not alone) may get it twice, from the terminal and from torchrun,
    which kills whatever has not stopped within 30 seconds.
    """

    def handle(*_):
        if progress.stop_requested and alone:
            raise KeyboardInterrupt
        progress.stop_requested = True
        again = b"; Ctrl-C again stops at once" if alone else b", if it ends within 30 seconds"
        with contextlib.suppress(OSError):  # print may be what was interrupted
            os.write(2, b"\nstopping after this step" + again + b"\n" if is_first() else b"")

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOPPING:
            found = signal.getsignal(number)
            if found in (signal.default_int_handler, signal.SIG_DFL):  # else ignored, as by nohup
                before[number] = found
                signal.signal(number, handle)
    try:
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)


def shows_bar(given: bool | None) -> bool:
    """Whether to show a progress bar: as given, else if stdout and stderr are terminals."""
    if given is not None or not (sys.stdout.isatty() and sys.stderr.isatty()):
        return bool(given)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # a terminal that does not tell
        return True


class LossLog:
    """losses.csv in a run's directory: a line for every step."""

    def __init__(self, directory):
        self.path = Path(directory) / "losses.csv"

    def on_start(self, run):
        if not is_first():
            return
        held_out = dict(run.evaluations)
        lines = (self._line(i, loss, held_out) for i, loss in enumerate(run.losses, 1))
        self.path.write_text("step,loss,held_out\n" + "".join(lines), encoding="utf-8")

    def on_step(self, run):
        if is_first():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self._line(run.step, run.losses[-1], dict(run.evaluations[-1:])))

    def _line(self, step, loss, held_out):
        return f"{step},{loss:.6g},{f'{held_out[step]:.6g}' if step in held_out else ''}\n"


class Samples:
    """Print a text that the model generates, every so many steps; the run does not notice."""

    LENGTH = 200  # bytes

    def __init__(self, every):
        self.every = every

    def on_start(self, run):
        pass

    def on_step(self, run):
        if not run.is_due(self.every):
            return
        device = run.model.embedding.weight.device
        sampling = Sampling(0.8, generator=torch.Generator(device).manual_seed(0))
        prompt = torch.tensor([[10]], device=device)  # a new line
        length = self.LENGTH
        if run.model.config.mask == "gate" and run.model.config.max_positions:
            length = min(length, run.model.config.max_positions - 1)
        sample = ids_to_text(generate(run.model, prompt, length, sampling)[0])
        print_once(f"--- step {run.step}\n{sample}\n---")
