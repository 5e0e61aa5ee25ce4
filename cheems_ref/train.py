"""Training a language model on a text: the plain loop.

    window of bytes → logits → cross-entropy → gradient, clipped → AdamW at learning_rate(step)

`cheems_lab.training` runs the same loop with checkpoints and over several processes.

Wrong settings and texts raise ValueError or TypeError naming argument and numbers (check.py).
Notebook 07 trains with it; `cheems train --help` does from the command line.
Source: WM App. C.2 (AdamW, warm-up, cosine).
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Integer
from torch import Tensor
from tqdm import tqdm

from cheems_ref import check
from cheems_ref.model import CausalLM
from cheems_ref.text import fingerprint

Text = Integer[Tensor, " l"]


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. The defaults are the papers' where they give one.

    Args:
        steps: number of updates.
        batch_size: windows per update.
        seq_len: tokens per window.
        learning_rate: the largest. The papers take 2e-4 for 320 million parameters and more; a
            model of a million takes, and needs, ten times that.
        min_lr_ratio: last learning rate as a share of the largest (2e-5 of 2e-4).
        warmup: share of the steps in which it rises linearly; then it falls as a cosine.
        betas, weight_decay: of AdamW. Decay is for matrices and tables, not for vectors (norms,
            step sizes, decay rates).
        max_grad_norm: largest norm of all gradients together.
        eval_fraction: share of the text, at its end, that is never trained on.
        seed: of the windows.
        precision: "float32"; "bfloat16" for autocast; "auto" for bfloat16 on a GPU that has it.
        evaluate_every: steps between two evaluations on the held-out text.
        checkpoint_every: steps between two checkpoints.
        micro_batch_size: windows that a process reads at a time; an update adds up the
            gradients of all its micro-batches. None for all at once.
        decay_steps: updates over which the learning rate rises and falls; after them it stays where
            it ends. None for all of the steps. A run that is to go on for more steps than it was
            made for keeps its schedule: TrainConfig(steps=2000, decay_steps=1000).

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
    checkpoint_every: int = 200
    micro_batch_size: int | None = None
    decay_steps: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON has lists
        check.plain_numbers(self)
        check.sizes(
            steps=self.steps,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            evaluate_every=self.evaluate_every,
            checkpoint_every=self.checkpoint_every,
            micro_batch_size=self.micro_batch_size,
            decay_steps=self.decay_steps,
        )
        check.numbers(
            "(0, inf)", learning_rate=self.learning_rate, max_grad_norm=self.max_grad_norm
        )
        check.numbers("[0, inf)", weight_decay=self.weight_decay)
        check.numbers("[0, 1]", min_lr_ratio=self.min_lr_ratio, warmup=self.warmup)
        check.numbers("(0, 1)", eval_fraction=self.eval_fraction)
        if len(self.betas) != 2:
            raise ValueError(f"betas must be two numbers, got {self.betas}")
        check.numbers("[0, 1)", **{f"betas[{i}]": beta for i, beta in enumerate(self.betas)})
        check.choice(("auto", "float32", "bfloat16"), precision=self.precision)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"seed must be a whole number, got {self.seed!r}")
        if not -(2**63) <= self.seed < 2**64:  # torch takes no others
            raise ValueError(f"seed must be from -2^63 to 2^64 - 1, got {self.seed}")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Compute the learning rate of an update, counted from 0: linear warm-up, then a cosine.

    It is learning_rate · (step + 1) / w during the first w = warmup · decay_steps updates (rounded
    up), then falls to min_lr_ratio · learning_rate in update number decay_steps, where two or more
    are left. Later updates keep that last rate.

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
    """Return AdamW for a model, with weight decay on what has two axes or more."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return torch.optim.AdamW(
        [
            dict(params=matrices, weight_decay=config.weight_decay),
            dict(params=vectors, weight_decay=0.0),
        ],
        lr=config.learning_rate,
        betas=config.betas,
    )


def split_text(ids: Text, eval_fraction: float) -> tuple[Tensor, Tensor]:
    """Split a text into what is trained on and the last part, which is held out."""
    n = len(ids) - math.ceil(eval_fraction * len(ids))
    return ids[:n], ids[n:]


def random_windows(
    ids: Text, config: TrainConfig, generator: torch.Generator
) -> Integer[Tensor, "b t"]:
    """Draw batch_size windows of t = seq_len + 1 tokens: all but the last are read, all but the
    first predicted.
    """
    starts = torch.randint(len(ids) - config.seq_len, (config.batch_size,), generator=generator)
    return ids[starts[:, None] + torch.arange(config.seq_len + 1)]


def n_micro_batches(config: TrainConfig, processes: int = 1) -> int:
    """Count the micro-batches in which each process reads its windows of an update."""
    windows = math.ceil(config.batch_size / processes)
    return math.ceil(windows / (config.micro_batch_size or windows))


@torch.no_grad()
def evaluate(
    model: CausalLM,
    ids: Text,
    *,
    seq_len: int = 256,
    batch_size: int = 16,
    rank: int = 0,
    world_size: int = 1,
) -> float:
    """Compute the mean cross-entropy per token of a text, in nats.

    The text is cut into windows, each read from its own start; every token but the first of the
    text is predicted once: -mean log p(token | those of its window before it, and the last one of
    the window before).

    Args:
        model: on any device.
        ids: at least 2 tokens, integers of any width.
        seq_len: tokens per window.
        batch_size: windows at a time.
        rank, world_size: this process and their number; each reads its share of every batch.
    """
    check.sizes(seq_len=seq_len, batch_size=batch_size)
    if len(ids) < 2:
        raise ValueError(f"there is nothing to predict in a text of {len(ids)} tokens")
    device, total = model.embedding.weight.device, 0.0
    *whole, last = (ids[i : i + seq_len + 1] for i in range(0, len(ids) - 1, seq_len))
    batches = [whole[i : i + batch_size] for i in range(0, len(whole), batch_size)]
    for batch in [*batches, [last]]:  # the last window may be shorter
        mine = torch.stack(batch).tensor_split(world_size)[rank].to(device)
        total += _loss(model, mine, reduction="sum").item()
    return _sum_over_ranks(total, device, world_size) / (len(ids) - 1)


@dataclass
class Run:
    """A training run: the model, the state of the training, and the losses so far.

    losses holds the loss of every step, evaluations pairs (steps done, held-out loss), both in nats
    per token. With several processes, rank is this one's number among world_size.
    """

    model: CausalLM
    config: TrainConfig
    ids: Tensor
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    rank: int = 0
    world_size: int = 1
    losses: list[float] = field(default_factory=list)
    evaluations: list[list[float]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return len(self.losses)

    @functools.cached_property
    def text(self) -> str:
        """The fingerprint of the ids, computed once."""
        return fingerprint(self.ids)

    def is_due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due now."""
        return self.step % every == 0 or self.step == self.config.steps


def start(
    model: CausalLM, ids: Text, config: TrainConfig, *, rank: int = 0, world_size: int = 1
) -> Run:
    """Return a run of no steps yet; arguments and errors are those of `train`."""
    _split(ids, model.config.vocab_size, config)
    if config.batch_size < world_size:
        raise ValueError(f"batch_size = {config.batch_size} is too few for {world_size} processes")
    generator = torch.Generator().manual_seed(config.seed)
    return Run(model, config, ids, make_optimizer(model, config), generator, rank, world_size)


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
        ids: the text, more than seq_len + 1 tokens in the part that is trained on. It stays in its
            own integers, such as uint8; only the windows that are read are widened.
        config: how.
        progress_bar: whether to show a progress bar with loss and tokens per second; None for
            only where there is a terminal.
        after_step: called after every step.

    Raises:
        FloatingPointError: training has diverged: a loss or gradient is NaN or infinite; the model
            stays as it was before that step.
    """
    run = start(model, ids, config)
    resume(run, progress_bar=progress_bar, after_step=after_step)
    return run


def resume(
    run: Run, *, progress_bar: bool | None = None, after_step: Callable[[Run], None] | None = None
) -> None:
    """Take the steps that a run still lacks; progress_bar and after_step are those of `train`."""
    config = run.config
    training, held_out = _split(run.ids, run.model.config.vocab_size, config)
    hidden = run.rank > 0 or _hidden(progress_bar)
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
    """Return CUDA where it can be used, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _split(ids, vocab_size, config):
    """The text to train on and the held-out one, if there is enough of both."""
    check.dtypes(check.INTEGERS, ids=ids)
    check.shapes(ids=(ids, "l"))
    check.entries(f"[0, {vocab_size})", ids=ids)
    training, held_out = split_text(ids, config.eval_fraction)
    if len(training) <= config.seq_len + 1 or len(held_out) < 2:
        raise ValueError(
            f"the text has {len(ids)} tokens: too few for windows of seq_len + 1 = "
            f"{config.seq_len + 1} and a held-out part of {config.eval_fraction:.0%}"
        )
    return training, held_out


def _step(run, training):
    """One optimiser step; raises, without stepping, if loss or gradient is not finite."""
    config, device = run.config, run.model.embedding.weight.device
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.step, config)
    windows = random_windows(training, config, run.generator).to(device)
    run.optimizer.zero_grad()
    value = 0.0
    for batch, weight in _micro_batches(windows, run):
        with _autocast(config.precision, device):
            loss = weight * _loss(run.model, batch)
        loss.backward()
        value += loss.item()
    value = _sum_over_ranks(value, device, run.world_size) / run.world_size
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.max_grad_norm)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a sharded model
    if not (math.isfinite(value) and bool(norm.isfinite())):
        raise _diverged(run, f"its loss is {value:g}, the norm of its gradient {norm:g}")
    run.optimizer.step()
    run.losses.append(value)


def _micro_batches(windows, run):
    """This process's micro-batches of a step, each with its weight in the loss.

    All processes read equally many, some of them perhaps empty, since all of them take part
    whenever a sharded model runs; the gradient is averaged over the processes.
    """
    mine = windows.tensor_split(run.world_size)[run.rank]
    for batch in mine.tensor_split(n_micro_batches(run.config, run.world_size)):
        yield batch, run.world_size * len(batch) / len(windows)


def _evaluate(run, held_out):
    seq_len, processes = run.config.seq_len, dict(rank=run.rank, world_size=run.world_size)
    nats = evaluate(run.model, held_out, seq_len=seq_len, **processes)
    if not math.isfinite(nats):
        raise _diverged(run, f"the held-out loss before it is {nats:g}")
    run.evaluations.append([run.step, nats])


def _sum_over_ranks(value, device, world_size):
    if world_size == 1:
        return value
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.tensor(value, dtype=dtype, device=device)
    dist.all_reduce(total)
    return total.item()


def _diverged(run, what):
    last = f" (the loss before was {run.losses[-1]:.4g})" if run.losses else ""
    return FloatingPointError(
        f"training diverged in update {run.step + 1}: {what}{last}; try a smaller learning_rate "
        f"(--learning-rate) than {run.config.learning_rate:g}"
    )


def _show(run, seconds, progress):
    tokens = run.config.batch_size * run.config.seq_len
    shown = dict(loss=f"{run.losses[-1]:.3f}", tokens=f"{tokens / seconds:,.0f}/s")
    if run.evaluations:
        shown["held_out"] = f"{run.evaluations[-1][1]:.3f}"
    progress.set_postfix(shown, refresh=False)
    progress.update()


def _loss(model, windows, reduction="mean"):
    """Cross-entropy of all tokens but the first, in float32 or wider."""
    windows = windows.long()  # of a text that may be kept as uint8
    logits, _ = model(windows[:, :-1], use_cache=False)
    wide = torch.promote_types(logits.dtype, torch.float32)
    targets = windows[:, 1:].flatten()
    if not len(windows):  # the mean of nothing is no number
        reduction = "sum"
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets, reduction=reduction)


def _autocast(precision, device):
    can = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if precision == "bfloat16" or (precision == "auto" and can):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _hidden(progress_bar):
    return (
        None if progress_bar is None else not progress_bar
    )  # tqdm: None is hidden where there is no terminal
