"""Train a Cheems with transformers' Trainer, as the papers did, and load it like any other model.

    pip install ".[trainer]"
    python examples/train_with_trainer.py --out runs/trainer
    torchrun --nproc-per-node 2 examples/train_with_trainer.py --out runs/trainer_data
    torchrun --nproc-per-node 2 examples/train_with_trainer.py --out runs/trainer_sharded --sharded

The first command trains in one process; the second in two, each of which reads half of an update's
windows (DDP); the third in two that also hold only half of the parameters and moments (FSDP2). The
losses are the same but for rounding. CUDA is used where it is there, in bfloat16 where it can.

The recipe is that of WM App. C.2: AdamW, a warm-up of 10 %, a cosine from 2e-4 to 2e-5. A model of
a million parameters takes ten times that (--learning-rate 2e-3). The library's warm-up begins at 0:
its first update changes nothing.

The same command goes on from the newest checkpoint, to the same losses. The third cannot: of a
model that it has cut the library keeps no moments. Trainer's checkpoints hold pickles: go on only
from what you wrote yourself. Start with torchrun, not with accelerate's launcher: where there is no
GPU, that starts a single process, without a word.
"""

import argparse
import importlib.util
import json
import math
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from cheems_ref import check
from cheems_ref.checkpoint import fingerprint
from cheems_ref.hub import byte_tokenizer, from_causal_lm
from cheems_ref.model import CausalLM, ModelConfig
from cheems_ref.text import read_text, text_to_ids
from cheems_ref.train import split_text


class Windows(torch.utils.data.Dataset):
    """Windows of a text by their starts: all bytes but the first of each are predicted."""

    def __init__(self, ids, starts, length):
        self.ids, self.starts, self.length = ids, starts, length

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, i):
        window = self.ids[self.starts[i] : self.starts[i] + self.length + 1]
        return dict(input_ids=window, labels=window)  # the model shifts the labels


class MatrixDecay(Trainer):
    """Trainer with weight decay on what has two axes or more, not on norms and decay rates."""

    def get_decay_parameter_names(self, model):
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]


def windows(ids, args):
    """Random ones to train on, in the order of their use, and all of the held-out part."""
    training, held_out = split_text(ids, 0.1)
    fitting = (len(held_out) - 1) // args.length // args.batch_size * args.batch_size
    if not fitting or len(training) <= args.length:
        raise ValueError(
            f"the text has {len(ids)} bytes; its last tenth must hold batch_size = "
            f"{args.batch_size} windows of length = {args.length}"
        )
    drawn = (len(training) - args.length, (args.steps * args.batch_size,))
    starts = torch.randint(*drawn, generator=torch.Generator().manual_seed(0))
    apart = torch.arange(fitting) * args.length  # whole batches: what lacks is repeated otherwise
    return Windows(training, starts, args.length), Windows(held_out, apart, args.length)


def recipe(args, n):
    """The settings of the papers, for each of n processes."""
    every = math.ceil(args.steps / 4)
    return TrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size // n,
        per_device_eval_batch_size=args.batch_size // n,
        train_sampling_strategy="sequential",
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs=dict(min_lr_rate=0.1),
        warmup_steps=0.1,  # of all
        weight_decay=0.01,
        adam_beta1=0.9,
        adam_beta2=0.999,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=math.ceil(args.steps / 100),
        eval_strategy="steps",
        eval_steps=every,
        prediction_loss_only=True,
        save_steps=every,
        save_total_limit=2,
        save_only_model=args.sharded,
        report_to="tensorboard" if args.tensorboard else "none",
    )


def newest(args, config, ids):
    """The checkpoint to go on from, or None; a directory of another run is refused."""
    out, said = Path(args.out), Path(args.out, "run.json")
    run = {name: value for name, value in vars(args).items() if name not in ("out", "tensorboard")}
    run |= dict(pattern=config.pattern, text=fingerprint(ids))
    done = sorted(
        out.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime
    )
    there = json.loads(said.read_text()) if said.exists() else {} if done else run
    if differ := [name for name, value in run.items() if there.get(name) != value]:
        raise ValueError(f"{out} holds another run, with other {', '.join(differ)}: name another")
    if done and args.sharded:
        raise ValueError(f"{out} holds a run of a sharded model, which cannot go on: name another")
    out.mkdir(parents=True, exist_ok=True)
    said.write_text(json.dumps(run))
    return done[-1].parent if done else None


def sharded(model, args, settings, n):
    """The same model, of which each process holds a part."""
    start = Path(args.out, "start")
    with settings.main_process_first(local=False):
        if settings.should_save:
            model.save_pretrained(start)
    parts = DistributedConfig(fsdp_size=n, fsdp_plan={"model.blocks.*": "free_full_weight"})
    return AutoModelForCausalLM.from_pretrained(start, distributed_config=parts)


def main(words=None):
    """Train, evaluate and write what the command line asks for; return the Trainer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, help="directory of the run")
    parser.add_argument("--text", help="UTF-8 file; Python's manual where there is none")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pattern", default="SESEIE", help="one letter per layer")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--length", type=int, default=256, help="bytes per window")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per update, of all")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="the largest")
    parser.add_argument("--sharded", action="store_true", help="a part in each process (FSDP2)")
    parser.add_argument("--tensorboard", action="store_true", help="log for TensorBoard, too")
    args, n = parser.parse_args(words), int(os.environ.get("WORLD_SIZE", 1))
    try:
        check.sizes(steps=args.steps, batch_size=args.batch_size, length=args.length)
        check.multiple(batch_size=args.batch_size, processes=n)
        config = ModelConfig(pattern=args.pattern, d_model=args.d_model)
        ids = text_to_ids(read_text(args.text))
        training, held_out = windows(ids, args)
        if args.sharded and n == 1:
            raise ValueError("--sharded needs several processes: start with torchrun")
        if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError('--tensorboard needs more: pip install ".[tensorboard]"')
        settings = recipe(args, n)
        with settings.main_process_first(local=False):
            checkpoint = newest(args, config, ids)
    except (OSError, TypeError, ValueError) as wrong:
        parser.error(str(wrong))
    torch.manual_seed(0)
    model = from_causal_lm(CausalLM(config))
    if args.sharded:
        model = sharded(model, args, settings, n)
    trainer = MatrixDecay(model, settings, train_dataset=training, eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=checkpoint)
    nats = trainer.evaluate()["eval_loss"]
    model.config.use_cache = True  # which Trainer has turned off
    trainer.save_model()
    if settings.should_save:
        byte_tokenizer().save_pretrained(args.out)
        print(f"held-out loss per byte: {nats:.3f} nats, {nats / math.log(2):.3f} bits")
        print("import cheems_ref.hub; from transformers import AutoModelForCausalLM")
        print(f"model = AutoModelForCausalLM.from_pretrained({args.out!r})")
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
