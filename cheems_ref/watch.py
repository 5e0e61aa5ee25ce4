"""What is said of a training run while it goes on, and what Ctrl-C asks of it.

Of several processes the first alone speaks, and all stop after the same update.
"""

import contextlib
import datetime
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

from cheems_ref import shards
from cheems_ref.checkpoint import newest_checkpoint, save

SILENCE = 30  # seconds, after which a run without a bar says where it is


def say(line, file=None):
    """Print a line now, if this is the first process."""
    if is_first():
        print(line, file=file, flush=True)


def is_first():
    """Whether this is the only process, or number 0 of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def processes():
    """How many torchrun has started, of which this is one; 0 where it is not torchrun's."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


def in_shell(*words):
    """A command that a shell takes as it is printed, wherever this Python is."""
    words = [sys.executable, "-m", "cheems_ref", *map(str, words)]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


class Watch:
    """A run while it trains: what is said of it, and what Ctrl-C asks of it."""

    def __init__(self, directory, newest, *, lines):
        self.directory, self.newest, self.lines = directory, newest, lines
        self.run, self.asked = None, False

    def starts(self, run):
        self.run, self.first = run, run.step
        self.began = self.said = time.monotonic()
        if self.newest is None:
            return
        steps, schedule = run.config.steps, run.config.schedule
        if run.step >= steps:
            say(f"{self.directory} is finished: {steps} updates are done; --steps N trains on")
            return
        say(f"going on from {self.newest}, after {run.step} of {steps} updates")
        if schedule is not None and schedule < steps:
            say(
                f"the learning rate keeps its schedule of {schedule} updates and stays at its end; "
                f"another --run has one of {steps}"
            )

    def goes_on(self, run):
        now = time.monotonic()
        if is_first := run.step == self.first + 1:
            self.began = now  # of what can be measured: the first update takes longer
        evaluated = bool(run.evaluations) and run.evaluations[-1][0] == run.step
        if self.lines and (evaluated or is_first or now - self.said >= SILENCE):
            self.said = now
            say(self._line(run, now - self.began, evaluated))
        asked = shards.summed(float(self.asked), run.model)  # the processes stop after one update
        if asked and run.step < run.config.steps:
            if run.step % run.config.checkpoint_every:  # else it has just been saved
                save(run, self.directory)
            raise KeyboardInterrupt

    def stopped(self):
        """Where, and what is kept."""
        newest = newest_checkpoint(self.directory)
        kept = f"the last checkpoint is {newest}" if newest else "no checkpoint was written yet"
        done = "before the first update"
        if self.run is not None:
            done = f"after update {self.run.step} of {self.run.config.steps}"
        return f"stopped {done}; {kept}"

    def _line(self, run, seconds, evaluated):
        done, config = run.step - self.first - 1, run.config
        held_out = f", held out {run.evaluations[-1][1]:.3f}" if evaluated else ""
        line = f"update {run.step} of {config.steps}: loss {run.losses[-1]:.3f}{held_out} nats"
        if done == 0 or seconds <= 0:
            return line
        speed = done * config.batch_size * config.length / seconds
        left = (config.steps - run.step) * seconds / done
        return f"{line}; {speed:,.0f} bytes/s, about {_clock(left)} to go"


@contextlib.contextmanager
def ctrl_c(watch, *, alone=True):
    """Let the first Ctrl-C ask the watch for an orderly end; the second stops at once.

    One of several processes (not alone) may hear it twice, from the terminal and from torchrun,
    which ends what has not stopped within 30 seconds.
    """

    def note(*_):
        if watch.asked and alone:
            raise KeyboardInterrupt
        watch.asked = True
        again = b"; Ctrl-C again stops at once" if alone else b", if that is within 30 seconds"
        with contextlib.suppress(OSError):  # print may be what was interrupted
            os.write(2, b"\nstopping after this update" + again + b"\n" if is_first() else b"")

    before = signal.getsignal(signal.SIGINT)
    main_thread = threading.current_thread() is threading.main_thread()
    mine = main_thread and before is signal.default_int_handler  # it may be ignored, as by nohup
    if mine:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, before)


def _clock(seconds):
    return str(datetime.timedelta(seconds=round(seconds)))
