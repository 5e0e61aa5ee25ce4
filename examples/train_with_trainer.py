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

from cheems_lab.hub import byte_tokenizer, from_causal_lm
from cheems_ref import check
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM
from cheems_ref.text import fingerprint, read_text, text_to_ids
from cheems_ref.train import TrainConfig, split_text


class MatrixDecay(Trainer):
    """Trainer with weight decay on what has two axes or more: not on norms, not on decay rates."""

    def get_decay_parameter_names(self, model):
        return [name for name, parameter in model.named_parameters() if parameter.ndim >= 2]


def recipe(args, n):
    """The papers' settings, for each of n processes."""
    cuda, quarter = torch.cuda.is_available(), math.ceil(args.steps / 4)
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
        bf16=cuda and torch.cuda.is_bf16_supported(),
        use_cpu=not cuda,
        logging_steps=math.ceil(args.steps / 100),
        eval_strategy="steps",
        eval_steps=quarter,
        save_steps=quarter,
        prediction_loss_only=True,
        save_total_limit=2,
        save_only_model=args.sharded,
        ddp_find_unused_parameters=False,
        logging_nan_inf_filter=False,  # which hides that a loss is no number
        report_to="tensorboard" if args.tensorboard else "none",
    )


def starts(ids, args):
    """Where the windows of a text begin: random ones to train on, in the order of their use, and
    those of the held-out part, as many as fill whole batches: others would be filled up with
    windows that are there already.
    """
    n, (training, held_out) = len(ids), map(len, split_text(ids, 0.1))
    batches = (held_out - 1) // (args.seq_len * args.batch_size)
    if not batches or training <= args.seq_len:
        raise ValueError(
            f"the text has {n} bytes: too few for windows of seq_len + 1 = {args.seq_len + 1} "
            f"and a tenth, held out, with batch_size = {args.batch_size} of them"
        )
    seed, used = torch.Generator().manual_seed(0), args.steps * args.batch_size
    drawn = torch.randint(training - args.seq_len, (used,), generator=seed).tolist()
    return drawn, range(training, n - 1, args.seq_len)[: batches * args.batch_size]


def newest(out, run):
    """The checkpoint to go on from, or None where there is none; another run's is refused."""
    said = out / "run.json"
    if said.exists():
        there = json.loads(said.read_text())
        if differ := [name for name, value in run.items() if there.get(name) != value]:
            raise ValueError(f"{out} holds a run with another {', '.join(differ)}: name another")
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds something else than a run of this program: name another")
    out.mkdir(parents=True, exist_ok=True)
    said.write_text(json.dumps(run))
    done = {int(p.parent.name[11:]): p.parent for p in out.glob("checkpoint-*/trainer_state.json")}
    if done and run["sharded"]:
        raise ValueError(f"{out} holds a run of a sharded model, which cannot go on: name another")
    return done[max(done)] if done else None


def sharded(model, settings):
    """The same model, of which each process holds a part."""
    start = Path(settings.output_dir, "start")
    with settings.main_process_first(local=False):
        if settings.should_save:
            model.save_pretrained(start)
    plan = {"model.blocks.*": "free_full_weight"}
    parts = DistributedConfig(fsdp_size=settings.world_size, fsdp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(start, distributed_config=parts)


def main(words=None):
    """Train, evaluate and write what the command line asks for; return the Trainer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the run")
    parser.add_argument("--text", help="UTF-8 file; Python's manual where there is none")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pattern", default="SESEIE", help="one letter per layer")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=256, help="bytes per window")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per update, of all")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="the largest")
    parser.add_argument("--sharded", action="store_true", help="a part in each process (FSDP2)")
    parser.add_argument("--tensorboard", action="store_true", help="log for TensorBoard, too")
    args, n = parser.parse_args(words), int(os.environ.get("WORLD_SIZE", 1))
    try:
        TrainConfig(args.steps, args.batch_size, args.seq_len, args.learning_rate)  # checks them
        check.multiple(batch_size=args.batch_size, processes=n)
        config = ModelConfig(pattern=args.pattern, d_model=args.d_model)
        ids = text_to_ids(read_text(args.text))
        training, held_out = starts(ids, args)
        if args.sharded and n == 1:
            raise ValueError("--sharded needs several processes: start with torchrun")
        if args.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ValueError('--tensorboard needs more: pip install ".[tensorboard]"')
        run = vars(args) | dict(pattern=config.pattern, text=fingerprint(ids))
        run |= dict(out=None, tensorboard=None)  # these may be others
        settings = recipe(args, n)
        if settings.n_gpu > 1:
            raise ValueError("several GPUs take several processes: start with torchrun")
        with settings.main_process_first(local=False):
            checkpoint = newest(args.out, run)
    except (OSError, TypeError, ValueError) as wrong:
        parser.exit(2, f"{parser.prog}: {wrong}\n")

    def windows(begins):
        read = ids[torch.tensor(begins)[:, None] + torch.arange(args.seq_len + 1)]
        return dict(input_ids=read, labels=read)  # the model shifts the labels

    torch.manual_seed(0)
    model = from_causal_lm(CausalLM(config))
    if args.sharded:
        model = sharded(model, settings)
    trainer = MatrixDecay(model, settings, windows, training, held_out)
    trainer.train(resume_from_checkpoint=checkpoint)
    nats = trainer.evaluate()["eval_loss"]
    model.config.use_cache = True  # which Trainer has turned off
    trainer.save_model()
    if settings.should_save:
        byte_tokenizer().save_pretrained(args.out)
        print(f"held-out loss per byte: {nats:.3f} nats, {nats / math.log(2):.3f} bits")
        print("import cheems_lab.hub; from transformers import AutoModelForCausalLM")
        print(f'model = AutoModelForCausalLM.from_pretrained("{args.out}")')
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
