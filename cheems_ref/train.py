"""Training a language model on a text: the plain loop.

    window of bytes → logits → cross-entropy → clipped gradient → AdamW at learning_rate(step)

`cheems_lab.training` runs the same loop with checkpoints and over several processes: its run is a
subclass of `Run`.

Invalid settings and texts raise ValueError or TypeError naming argument and numbers (check.py).
Notebook 07 trains with it; `cheems train --help` does from the command line.
Source: WM App. C.2 (AdamW, warm-up, cosine).
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from jaxtyping import Integer
from torch import Tensor
from tqdm import tqdm

from cheems_ref import check
from cheems_ref.model import CausalLM

Text = Integer[Tensor, " l"]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. The defaults are from the papers, if they state them.

    Args:
        steps: number of optimiser steps.
        batch_size: windows per step.
        seq_len: tokens per window.
        learning_rate: the largest. The papers take 2e-4 for 320 million parameters and more; a
            model of a million needs ten times as much.
        min_lr_ratio: last learning rate as a fraction of the largest (2e-5 of 2e-4).
        warmup: fraction of the steps with a linear increase; then the rate falls as a cosine.
        betas, weight_decay: of AdamW. Decay is for matrices and tables, not for vectors (norms,
            step sizes, decay rates).
        max_grad_norm: largest norm of all gradients together.
        eval_fraction: fraction of the text, at its end, that is never trained on.
        seed: of the windows.
        precision: "float32"; "bfloat16" for autocast; "auto" for bfloat16 on a GPU that has it.
        evaluate_every: steps between two evaluations on the held-out text.
        micro_batch_size: windows read at a time; a step adds up the gradients of all its
            micro-batches. None for all at once.
        decay_steps: steps of the schedule; after them the learning rate keeps its last value. None
            for all steps. To extend a run of 1,000 steps without changing its schedule, use
            TrainConfig(steps=2000, decay_steps=1000).

    Source: WM App. C.2; Ch §4.1, which takes betas (0.9, 0.98).
    """

    steps: int = 1000
    batch_size: int = 8
    seq_len: int = 256
    learning_rate: float | int = 2e-3
    min_lr_ratio: float | int = 0.1
    warmup: float | int = 0.1
    betas: tuple[float | int, float | int] = (0.9, 0.999)
    weight_decay: float | int = 0.01
    max_grad_norm: float | int = 1.0
    eval_fraction: float | int = 0.1
    seed: int = 0
    precision: str = "auto"
    evaluate_every: int = 200
    micro_batch_size: int | None = None
    decay_steps: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON has lists
        check.plain_numbers(self)
        whole = [f.name for f in fields(self) if f.type in (int, int | None) and f.name != "seed"]
        check.sizes(**{name: getattr(self, name) for name in whole})
        for name in ("learning_rate", "max_grad_norm"):
            check.numbers("(0, inf)", **{name: getattr(self, name)})
        check.numbers("[0, inf)", weight_decay=self.weight_decay)
        check.numbers("[0, 1]", min_lr_ratio=self.min_lr_ratio, warmup=self.warmup)
        check.numbers("(0, 1)", eval_fraction=self.eval_fraction)
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, got {self.betas}")
        check.numbers("[0, 1)", **{f"betas[{i}]": beta for i, beta in enumerate(self.betas)})
        check.choice(("auto", "float32", "bfloat16"), precision=self.precision)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"seed must be a whole number, got {self.seed!r}")
        check.numbers(f"[{-(2**63)}, {2**64})", seed=self.seed)  # torch takes no others


def learning_rate(step: int, config: TrainConfig) -> float:
    """Compute the learning rate of a step, counted from 0: linear warm-up, then a cosine.

    It is learning_rate · (step + 1) / w during the first w = warmup · decay_steps steps (rounded
    up), then falls to min_lr_ratio · learning_rate in step number decay_steps, if two or more are
    left. Later steps keep this last rate.

    Source: WM App. C.2.
    """
    n = config.decay_steps or config.steps
    step = min(step, n - 1)
    rising = math.ceil(config.warmup * n)
    if step < rising:
        return config.learning_rate * (step + 1) / rising
    progress = (step - rising) / max(1, n - 1 - rising)
    share = config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * share


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW for a model, with weight decay on parameters of two or more axes."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    decayed = dict(params=matrices, weight_decay=config.weight_decay)
    groups = [decayed, dict(params=vectors, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)


def split_text(ids: Text, eval_fraction: float) -> tuple[Tensor, Tensor]:
    """Split a text into the training part and the held-out part at its end."""
    n = len(ids) - math.ceil(eval_fraction * len(ids))
    return ids[:n], ids[n:]


def check_length(n: int, config: TrainConfig) -> None:
    """Raise ValueError if a text of n tokens is too short for a window, or for an evaluation."""
    held_out = math.ceil(config.eval_fraction * n)
    if n - held_out <= config.seq_len + 1 or held_out < 2:
        raise ValueError(
            f"the text has {n} tokens: too few for windows of seq_len + 1 = {config.seq_len + 1} "
            f"and a held-out part of {config.eval_fraction:.0%}"
        )


def random_windows(
    ids: Text, config: TrainConfig, generator: torch.Generator
) -> Integer[Tensor, "b t"]:
    """Draw batch_size windows of t = seq_len + 1 tokens: all but the last are read, all but the
    first predicted.
    """
    size, cpu = (config.batch_size, 1), generator.device  # whatever torch's default device is
    starts = torch.randint(len(ids) - config.seq_len, size, generator=generator, device=cpu)
    return ids[starts + torch.arange(config.seq_len + 1, device=cpu)]


def n_micro_batches(windows: int, micro_batch_size: int | None) -> int:
    """Count the micro-batches of a step that reads so many windows."""
    return math.ceil(windows / (micro_batch_size or windows))


def next_token_loss(
    model: CausalLM, windows: Integer[Tensor, "b t"], reduction: str = "mean"
) -> Tensor:
    """Compute the cross-entropy of all tokens of the windows but the first, in float32 or wider."""
    windows = windows.long()  # the text may be uint8
    logits, _ = model(windows[:, :-1], use_cache=False)
    wide = torch.promote_types(logits.dtype, torch.float32)
    targets = windows[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets, reduction=reduction)


def evaluation_windows(
    ids: Text, seq_len: int, batch_size: int
) -> Iterator[Integer[Tensor, "b t"]]:
    """Cut a text into batches of windows of t = seq_len + 1 tokens that overlap by one token.

    The last window may be shorter, and comes alone.
    """
    *whole, last = (ids[i : i + seq_len + 1] for i in range(0, len(ids) - 1, seq_len))
    for i in range(0, len(whole), batch_size):
        yield torch.stack(whole[i : i + batch_size])
    yield last[None]


@torch.no_grad()
def evaluate(model: CausalLM, ids: Text, *, seq_len: int = 256, batch_size: int = 16) -> float:
    """Compute the mean cross-entropy per token of a text, in nats.

    The text is cut into windows that overlap by one token. Every token but the first of the text is
    predicted once, from the earlier tokens of its window.

    Args:
        model: on any device.
        ids: at least 2 tokens, integers of any width.
        seq_len: tokens per window.
        batch_size: windows at a time.
    """
    check.sizes(seq_len=seq_len, batch_size=batch_size)
    if len(ids) < 2:
        raise ValueError(f"there is nothing to predict in a text of {len(ids)} tokens")
    device, total = model.embedding.weight.device, 0.0
    for windows in evaluation_windows(ids, seq_len, batch_size):
        total += next_token_loss(model, windows.to(device), reduction="sum").item()
    return total / (len(ids) - 1)


@dataclass
class Run:
    """A training run: the model, the state of the training, and the losses so far.

    losses contains the loss of every step, evaluations pairs (steps done, held-out loss), both in
    nats per token.
    """

    model: CausalLM
    config: TrainConfig
    ids: Tensor
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    losses: list[float] = field(default_factory=list)
    evaluations: list[list[float]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return len(self.losses)

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due now."""
        return self.step % every == 0 or self.step == self.config.steps

    def backward(self, windows: Integer[Tensor, "b t"]) -> float:
        """Compute the mean loss of a step's windows, and add its gradient to the parameters'."""
        device, total = self.model.embedding.weight.device, 0.0
        n = n_micro_batches(len(windows), self.config.micro_batch_size)
        for batch in windows.tensor_split(n):
            with autocast(self.config.precision, device):
                mean = next_token_loss(self.model, batch.to(device))
                loss = len(batch) / len(windows) * mean
            loss.backward()
            total += loss.item()
        return total

    def clip_gradients(self) -> Tensor:
        """Scale all gradients to a norm of max_grad_norm at most; return their norm before."""
        parameters = self.model.parameters()
        return torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)

    def evaluate(self, held_out: Tensor) -> float:
        """Compute the held-out loss, in nats per token."""
        return evaluate(self.model, held_out, seq_len=self.config.seq_len)


def start(model: CausalLM, ids: Text, config: TrainConfig) -> Run:
    """Return a run of no steps yet; arguments and errors are as for `train`."""
    check.dtypes(check.INTEGERS, ids=ids)
    check.shapes(ids=(ids, "l"))
    check.entries(f"[0, {model.config.vocab_size})", ids=ids)
    check_length(len(ids), config)
    generator = torch.Generator().manual_seed(config.seed)
    return Run(model, config, ids, make_optimizer(model, config), generator)


def train(
    model: CausalLM,
    ids: Text,
    config: TrainConfig,
    *,
    progress_bar: bool | None = None,
    after_step: Callable[[Run], None] | None = None,
) -> Run:
    """Train a model on a text, in place. The same machine, threads and seed give the same run.

    Args:
        model: on the device where it is to be trained.
        ids: the text, with more than seq_len + 1 tokens in its training part. It keeps its integer
            dtype, such as uint8; only the windows that are read are widened.
        config: settings.
        progress_bar: whether to show a progress bar with loss and tokens per second; None for only
            on a terminal.
        after_step: called after every step.

    Raises:
        FloatingPointError: training diverged: a loss or gradient is NaN or infinite. The model is
            left as before this step.
    """
    run = start(model, ids, config)
    resume(run, progress_bar=progress_bar, after_step=after_step)
    return run


def resume(
    run: Run, *, progress_bar: bool | None = None, after_step: Callable[[Run], None] | None = None
) -> None:
    """Take the remaining steps of a run in memory, all of them if it is new.

    progress_bar and after_step are as for `train`. The lab reads checkpoints (README.md).
    """
    config = run.config
    training, held_out = split_text(run.ids, config.eval_fraction)
    hidden = None if progress_bar is None else not progress_bar  # None: without a terminal
    with tqdm(total=config.steps, initial=run.step, disable=hidden, unit="step") as progress:
        while run.step < config.steps:
            started = time.perf_counter()
            _step(run, training)
            seconds = time.perf_counter() - started
            if run.is_due(config.evaluate_every):
                _evaluate(run, held_out)
            _show(run, seconds, progress)
            if after_step is not None:
                after_step(run)


def default_device() -> torch.device:
    """Return the GPU where there is one (CUDA, or Apple's MPS), else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the context in which a model computes losses: in bfloat16, or as it is."""
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    wanted = precision == "bfloat16" or (precision == "auto" and fast)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=wanted)


def _step(run, training):
    """One optimiser step; raises, without stepping, if loss or gradient is not finite."""
    config = run.config
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.step, config)
    windows = random_windows(training, config, run.generator)
    run.optimizer.zero_grad()
    loss = run.backward(windows)
    norm = run.clip_gradients()
    if not (math.isfinite(loss) and bool(norm.isfinite())):
        raise _diverged(run, f"its loss is {loss:g}, the norm of its gradient {norm:g}")
    run.optimizer.step()
    run.losses.append(loss)


def _evaluate(run, held_out):
    nats = run.evaluate(held_out)
    if not math.isfinite(nats):
        raise _diverged(run, f"the held-out loss before it is {nats:g}")
    run.evaluations.append([run.step, nats])


def _diverged(run, what):
    last = f" (the loss before was {run.losses[-1]:.4g})" if run.losses else ""
    return FloatingPointError(
        f"training diverged in update {run.step + 1}: {what}{last}; try a smaller learning_rate "
        f"than {run.config.learning_rate:g}"
    )


def _show(run, seconds, progress):
    """Draw the progress bar, which is switched off where it cannot be written any more."""
    shown = {"loss": f"{run.losses[-1]:.3f}"}
    if seconds > 0:  # a coarse clock may stand still
        tokens = run.config.batch_size * run.config.seq_len
        shown["tokens"] = f"{tokens / seconds:,.0f}/s"
    if run.evaluations:
        shown["held_out"] = f"{run.evaluations[-1][1]:.3f}"
    try:
        progress.set_postfix(shown, refresh=False)
        progress.update()
    except OSError:  # the terminal is closed, or the disk under the log is full
        progress.disable = True
