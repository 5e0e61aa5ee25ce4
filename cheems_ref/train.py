"""Training a language model on a text, in one loop that can be stopped and resumed at any time.

    window of bytes → logits → cross-entropy → gradient, clipped → AdamW at learning_rate(step)

A run lives in a directory of checkpoints, each a directory of its own:

    run/step-00000200/model.safetensors       the parameters
                      optimizer.safetensors   AdamW's two moments of each
                      checkpoint.json         both configs, step, losses, random state, checksums

It is written beside its place and renamed into it when it is complete, so that a run killed at any
moment leaves its last checkpoint whole, and it holds all that the next step depends on: a resumed
run goes through the same losses, to the last digit, as one that was never stopped. Nothing in it is
unpickled.

Notebook 07 trains with it; `python -m cheems_ref train --help` does from the command line.
Source: WM App. C.2 (AdamW, warm-up, cosine).
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from cheems_ref.model import CausalLM, ModelConfig

FORMAT = "cheems_ref checkpoint 1"
FILES = ("model.safetensors", "optimizer.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that is not one of this run."""


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. The defaults are the papers' where they give one.

    Args:
        steps: number of updates.
        batch_size: windows per update.
        length: tokens per window.
        learning_rate: the largest. The papers take 2e-4 for 320 million parameters and more; a
            model of a million takes, and needs, ten times that.
        final: last learning rate as a share of the largest (2e-5 of 2e-4).
        warmup: share of the steps in which it rises linearly; then it falls as a cosine.
        betas, weight_decay: of AdamW. Decay is for matrices and tables, not for vectors (norms,
            step sizes, decay rates).
        clip: largest norm of all gradients together.
        held_out: share of the text, at its end, that is never trained on.
        seed: of the windows.
        precision: "float32"; "bfloat16" for autocast; "auto" for bfloat16 on a GPU that has it.
        evaluate_every: steps between two evaluations on the held-out text.
        checkpoint_every: steps between two checkpoints.

    Raises:
        ValueError: a number out of its range, or betas that are not two.
        TypeError: a count that is not a whole number.

    Source: WM App. C.2; Ch §4.1, which takes betas (0.9, 0.98).
    """

    steps: int = 1000
    batch_size: int = 8
    length: int = 256
    learning_rate: float | int = 2e-3
    final: float | int = 0.1
    warmup: float | int = 0.1
    betas: tuple[float | int, float | int] = (0.9, 0.999)
    weight_decay: float | int = 0.01
    clip: float | int = 1.0
    held_out: float | int = 0.1
    seed: int = 0
    precision: str = "auto"
    evaluate_every: int = 200
    checkpoint_every: int = 200

    def __post_init__(self):
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON has lists
        for name in ("steps", "batch_size", "length", "evaluate_every", "checkpoint_every"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name} must be a whole number, got {getattr(self, name)!r}")
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        for name in ("final", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be in (0, 1), got {self.held_out}")
        betas_fit = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be a number ≥ 0, got {self.weight_decay}")
        if not betas_fit:
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if self.precision not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"precision must be auto, float32 or bfloat16, got {self.precision!r}")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Compute the learning rate of update `step`, counted from 0: linear warm-up, then a cosine.

    Args:
        step: in [0, steps).
        config: of the run.

    Returns:
        learning_rate · (step + 1) / w during the w = warmup · steps first updates, rounded up; then
        from learning_rate down to final · learning_rate in the last update.

    Source: WM App. C.2.
    """
    rising = math.ceil(config.warmup * config.steps)
    if step < rising:
        return config.learning_rate * (step + 1) / rising
    progress = (step - rising) / max(1, config.steps - 1 - rising)
    share = config.final + (1 - config.final) * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * share


def make_optimizer(model: CausalLM, config: TrainConfig) -> torch.optim.AdamW:
    """Make AdamW for a model, with weight decay on what has two axes or more."""
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


def split_text(ids: Int[Tensor, " l"], held_out: float) -> tuple[Tensor, Tensor]:
    """Split a text into what is trained on and the last part, which is held out."""
    n = len(ids) - math.ceil(held_out * len(ids))
    return ids[:n], ids[n:]


def random_windows(
    ids: Int[Tensor, " l"], config: TrainConfig, generator: torch.Generator
) -> Int[Tensor, "b t"]:
    """Draw batch_size windows (b, length + 1): all but the last token is read, all but the first
    predicted.
    """
    starts = torch.randint(len(ids) - config.length, (config.batch_size,), generator=generator)
    return ids[starts[:, None] + torch.arange(config.length + 1)]


@torch.no_grad()
def evaluate(
    model: CausalLM, ids: Int[Tensor, " l"], *, length: int = 256, batch_size: int = 16
) -> float:
    """Compute the mean cross-entropy per token of a text, in nats.

    The text is cut into windows, each read from its own start; every token but the first of the
    text is predicted once.

    Args:
        model: on any device.
        ids: (l,), at least 2 tokens.
        length: tokens per window.
        batch_size: windows at a time.

    Returns:
        -mean log p(token | those before it in the window, and the last one of the window before).

    Raises:
        ValueError: fewer than 2 tokens, or length or batch_size below 1.
    """
    if length < 1 or batch_size < 1:
        raise ValueError(f"length and batch_size must be ≥ 1, got {length} and {batch_size}")
    if len(ids) < 2:
        raise ValueError(f"there is nothing to predict in a text of {len(ids)} tokens")
    device = model.embedding.weight.device
    total = 0.0
    windows = [ids[i : i + length + 1] for i in range(0, len(ids) - 1, length)]
    whole = [window for window in windows if len(window) == length + 1]
    rest = [window for window in windows if len(window) < length + 1]
    batches = [whole[i : i + batch_size] for i in range(0, len(whole), batch_size)]
    for batch in [*batches, rest] if rest else batches:
        total += _loss(model, torch.stack(batch).to(device), reduction="sum").item()
    return total / (len(ids) - 1)


@dataclass
class Run:
    """A training run: what it trains, how far it is, and what it went through.

    model, config and ids are the caller's; losses holds the loss of every update, evaluations pairs
    (updates done, held-out loss), both in nats per token.
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
        """Number of updates done."""
        return len(self.losses)


def train(
    model: CausalLM,
    ids: Int[Tensor, " l"],
    config: TrainConfig,
    *,
    directory: str | Path | None = None,
    bar: bool | None = None,
    after_step: Callable[[Run], None] | None = None,
) -> Run:
    """Train a model on a text, in place.

    With a directory the run is saved there every `checkpoint_every` updates and at its end, the
    last two checkpoints being kept, and if it holds a checkpoint, the run goes on from it.

    Args:
        model: on the device where it is to be trained.
        ids: (l,), the text, more than length + 1 tokens in the part that is trained on.
        config: how.
        directory: where checkpoints go; None for none.
        bar: whether to show a progress bar with loss and tokens per second; None for only where
            there is a terminal.
        after_step: called after every update.

    Returns:
        The run: losses and evaluations. The same machine, threads and seed give the same run.

    Raises:
        ValueError: the text is too short, or not integers of one axis.
        CheckpointError: the directory holds a checkpoint that is damaged, or of another run.
        OSError: the directory cannot be made.
        FloatingPointError: a loss or gradient is NaN or infinite; the model stays as it was before
            that update, and so does the last checkpoint.
    """
    if ids.ndim != 1 or ids.is_floating_point():
        raise ValueError(f"ids must be integers (l,), got {ids.dtype} {tuple(ids.shape)}")
    model.check(ids[None])
    training, held_out = split_text(ids.long(), config.held_out)
    if len(training) <= config.length + 1 or len(held_out) < 2:
        raise ValueError(
            f"the text has {len(ids)} tokens: too few for windows of length + 1 = "
            f"{config.length + 1} and a held-out part of {config.held_out:.0%}"
        )
    run = Run(
        model,
        config,
        ids,
        make_optimizer(model, config),
        torch.Generator().manual_seed(config.seed),
    )
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        if (newest := newest_checkpoint(directory)) is not None:
            restore(run, newest)
    device = model.embedding.weight.device
    with tqdm(total=config.steps, initial=run.step, disable=_hidden(bar), unit="step") as progress:
        while run.step < config.steps:
            started = time.perf_counter()
            for group in run.optimizer.param_groups:
                group["lr"] = learning_rate(run.step, config)
            windows = random_windows(training, config, run.generator).to(device)
            with _autocast(config.precision, device):
                loss = _loss(model, windows)
            run.optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            if not (math.isfinite(value := loss.item()) and bool(norm.isfinite())):
                raise FloatingPointError(
                    f"the loss of update {run.step} is {value}, the norm of its gradient "
                    f"{norm.item()}; a smaller learning_rate than {config.learning_rate:g} may help"
                )
            run.optimizer.step()
            run.losses.append(value)
            seconds = time.perf_counter() - started

            last = run.step == config.steps
            if run.step % config.evaluate_every == 0 or last:
                nats = evaluate(model, held_out, length=config.length)
                run.evaluations.append([run.step, nats])
            if directory is not None and (run.step % config.checkpoint_every == 0 or last):
                save(run, directory)
            shown = dict(loss=f"{value:.3f}", tokens=f"{windows[:, 1:].numel() / seconds:,.0f}/s")
            if run.evaluations:
                shown["held_out"] = f"{run.evaluations[-1][1]:.3f}"
            progress.set_postfix(shown, refresh=False)
            progress.update()
            if after_step is not None:
                after_step(run)
    return run


def save(run: Run, directory: str | Path) -> Path:
    """Write a checkpoint of a run, complete or not at all, and drop those before the last two.

    Returns:
        The checkpoint's directory, directory/step-NNNNNNNN.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob("partial-*"):  # of a run that was killed
        shutil.rmtree(leftover)
    final = directory / f"step-{run.step:08d}"
    partial = directory / f"partial-{final.name}"
    partial.mkdir()
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    state = run.optimizer.state
    moments = {
        f"{names[id(parameter)]}.{moment}": state[parameter][moment]
        for parameter in state
        for moment in ("exp_avg", "exp_avg_sq")
    }
    parameters = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    for name, tensors in zip(FILES, (parameters, moments), strict=True):
        save_file({key: t.contiguous().cpu() for key, t in tensors.items()}, partial / name)
    record = {
        "format": FORMAT,
        "model": dataclasses.asdict(run.model.config),
        "dtype": str(run.model.embedding.weight.dtype).removeprefix("torch."),
        "training": dataclasses.asdict(run.config),
        "text": _fingerprint(run.ids),
        "step": run.step,
        "losses": run.losses,
        "evaluations": run.evaluations,
        "random_state": base64.b64encode(run.generator.get_state().numpy().tobytes()).decode(),
        "sha256": {name: _sha256(partial / name) for name in FILES},
    }
    record["checksum"] = _checksum(record)
    (partial / "checkpoint.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    for path in (*partial.iterdir(), partial):
        _to_disk(path)
    if final.exists() and _is_whole(final, record["checksum"]):
        shutil.rmtree(partial)  # this very checkpoint is there already
    else:
        if final.exists():  # of another run, or damaged
            final.rename(directory / f"partial-old-{final.name}")
        partial.rename(final)
    _to_disk(directory)
    for old in _checkpoints(directory)[:-2]:
        old.rename(old.with_name(f"partial-old-{old.name}"))  # so that half of one is never read
    for old in directory.glob("partial-old-*"):
        shutil.rmtree(old)
    return final


def newest_checkpoint(directory: str | Path) -> Path | None:
    """Find the checkpoint of the most updates in a run's directory; None if there is none."""
    found = _checkpoints(Path(directory))
    return found[-1] if found else None


def restore(run: Run, checkpoint: str | Path) -> None:
    """Set a run, its model and its optimiser to where they were when a checkpoint was written.

    Raises:
        CheckpointError: it is damaged, or of another model, text or configuration; the message
            names what differs. The run and the files are left as they were.
    """
    checkpoint = Path(checkpoint)
    record = _read_record(checkpoint)
    for name, here in (("model", run.model.config), ("training", run.config)):
        mine, theirs = json.loads(json.dumps(dataclasses.asdict(here))), record[name]
        differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
        if differ:
            listed = ", ".join(f"{key} ({theirs.get(key)}, now {mine.get(key)})" for key in differ)
            raise CheckpointError(f"{checkpoint} is of another run; what differs: {listed}")
    if record["text"] != _fingerprint(run.ids):
        raise CheckpointError(f"{checkpoint} is of a run on another text")
    parameters = dict(run.model.named_parameters())
    weights = _read_tensors(checkpoint, FILES[0], record, parameters)
    keys = ("exp_avg", "exp_avg_sq")
    wanted = {f"{name}.{key}": t for name, t in parameters.items() for key in keys}
    moments = _read_tensors(checkpoint, FILES[1], record, wanted)
    state = _read_random_state(checkpoint, record, len(run.generator.get_state()))

    # All that can be wrong was looked for; from here on the run is changed.
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
            run.optimizer.state[parameter] = {
                "step": torch.tensor(float(record["step"]), dtype=torch.float32),
                **{key: moments[f"{name}.{key}"].to(parameter) for key in keys},
            }
    run.generator.set_state(state)
    run.losses[:], run.evaluations[:] = record["losses"], record["evaluations"]


def load_model(path: str | Path, *, device: str | torch.device = "cpu") -> CausalLM:
    """Make the model of a checkpoint, or of the newest one in a run's directory, in its dtype.

    Args:
        path: of a checkpoint or a run.
        device: where to.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    path = Path(path)
    checkpoint = newest_checkpoint(path) or path
    record = _read_record(checkpoint)
    try:
        model = CausalLM(ModelConfig(**record["model"]))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} holds no model of this version: {error}") from error
    model.to(getattr(torch, record["dtype"]))
    parameters = dict(model.named_parameters())
    weights = _read_tensors(checkpoint, FILES[0], record, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model.to(device)


def default_device() -> torch.device:
    """Choose CUDA where it can be used, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _loss(model, windows, reduction="mean"):
    logits, _ = model(windows[:, :-1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    targets = windows[:, 1:].flatten().long()
    return F.cross_entropy(logits.flatten(0, 1).to(wide), targets, reduction=reduction)


def _autocast(precision, device):
    can = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if precision == "bfloat16" or (precision == "auto" and can):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _hidden(bar):
    return None if bar is None else not bar  # tqdm: None is hidden where there is no terminal


def _checkpoints(directory):
    named = re.compile(r"step-\d{8,}")
    found = [path for path in directory.glob("step-*") if named.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=lambda path: int(path.name[5:]))


def _fingerprint(ids):
    return hashlib.sha256(ids.to(torch.int64).cpu().numpy().tobytes()).hexdigest()


def _is_whole(checkpoint, checksum):
    """Whether a checkpoint holds what this checksum is of."""
    try:
        record = _read_record(checkpoint)
    except CheckpointError:
        return False
    files = all(
        (checkpoint / name).is_file() and _sha256(checkpoint / name) == record["sha256"][name]
        for name in FILES
    )
    return files and record["checksum"] == checksum


def _checksum(record):
    """Of a record as JSON, without its own checksum."""
    rest = {key: value for key, value in record.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path):
    """Wait until a file, or the names in a directory, are on the disk and not only in memory."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no directories, and has renamed by now
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_record(checkpoint):
    path = checkpoint / "checkpoint.json"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} holds no checkpoint: there is no {path.name}, nor a step-* with one"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{path} does not say {FORMAT!r}: it was not written by this package")
    kinds = dict(model=dict, dtype=str, training=dict, text=str, step=int, losses=list)
    kinds |= dict(evaluations=list, random_state=str, sha256=dict)
    wrong = [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
    if wrong:
        raise CheckpointError(f"{path} lacks {', '.join(wrong)}, or holds something else there")
    fits = len(record["losses"]) == record["step"] and {*record["sha256"]} == {*FILES}
    fits = fits and all(isinstance(loss, float) for loss in record["losses"])
    if not fits or record.get("checksum") != _checksum(record):
        raise CheckpointError(f"{path} is damaged: it does not fit its checksum")
    return record


def _read_random_state(checkpoint, record, size):
    try:
        state = base64.b64decode(record["random_state"], validate=True)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint}/checkpoint.json holds no random state: {error}"
        ) from error
    if len(state) != size:
        raise CheckpointError(f"{checkpoint}/checkpoint.json holds no random state of {size} bytes")
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _read_tensors(checkpoint, name, record, like):
    """The tensors of one file, after all that can be wrong with them was looked for."""
    path = checkpoint / name
    if not path.is_file():
        raise CheckpointError(f"{checkpoint} is incomplete: there is no {name} in it")
    if _sha256(path) != record["sha256"][name]:
        raise CheckpointError(
            f"{path} is damaged: it is not what was written (its SHA-256 differs). Go back to the "
            "checkpoint before it by moving this one away"
        )
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    strange = sorted({*tensors} ^ {*like})
    strange = strange or [
        key
        for key, t in tensors.items()
        if (t.shape, t.dtype) != (like[key].shape, like[key].dtype)
    ]
    if strange:
        raise CheckpointError(f"{path} does not fit the model, at {', '.join(strange[:3])}")
    return tensors
