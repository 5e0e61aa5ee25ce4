"""The command line: train a model on a text of yours, and let it write.

    python -m cheems_ref train --text FILE --run DIRECTORY
    python -m cheems_ref generate --run DIRECTORY --prompt "Once"

Texts are read as bytes, so any language and any file in UTF-8 will do.
"""

import argparse
import codecs
import dataclasses
import json
import math
import sys
from pathlib import Path

import torch

from cheems_ref import text
from cheems_ref.model import (
    PRESETS,
    CausalLM,
    ModelConfig,
    Sampling,
    count_parameters,
    preset,
    stream,
)
from cheems_ref.train import (
    TrainConfig,
    default_device,
    load_model,
    newest_checkpoint,
    split_text,
    train,
)

TRAIN = """\
Train a language model on a text, byte by byte.

The model is a preset, or a pattern of letters, one for each layer:
  S SSD, A attention, I inner-function attention; M MLP, G gated MLP, R routed MoE,
  E CDMoE, K CDMMoE, P PEER, ... (python -c "import cheems_ref.config as c; help(c)")

examples:
  python -m cheems_ref train --text book.txt --run runs/book
  python -m cheems_ref train --text book.txt --run runs/llama --pattern "AM x 4" --steps 500
  python -m cheems_ref train --text book.txt --run runs/big --set d_model=256 --set d_ff=512
  python -m cheems_ref train --run runs/manual            (Python's own manual as the text)

Stop it at any time, with Ctrl-C or worse: the same command goes on from the last checkpoint
and comes to the same losses as a run that was never stopped.
"""
GENERATE = """\
Write on after a prompt, with a model that "train" made.

examples:
  python -m cheems_ref generate --run runs/book --prompt "It was"
  python -m cheems_ref generate --run runs/book --prompt "It was" --temperature 0   (most likely)
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; None for the arguments of the process."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.command(parsed)
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, ArithmeticError) as error:
        print(f"cheems_ref: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _train(a):
    ids = text.text_to_ids(text.read_text(a.text))
    config = _model_config(a)
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    training = TrainConfig(**{k: v for k, v in vars(a).items() if k in names and v is not None})
    device = _device(a)
    torch.manual_seed(training.seed)
    model = CausalLM(config).to(device)
    counts = count_parameters(config).values()
    kept, held_out = (len(part) for part in split_text(ids, training.held_out))
    print(
        f"{config.pattern}: {sum(c.total for c in counts):,} parameters, "
        f"{sum(c.active for c in counts):,} of them active per token; on {device}\n"
        f"{kept:,} bytes to train on, {held_out:,} held out; "
        f"{training.batch_size * training.length:,} per update, {training.steps} updates"
    )
    if (newest := newest_checkpoint(a.run)) is not None:
        print(f"going on from {newest}")
    run = train(model, ids, training, directory=a.run, bar=a.bar)
    nats = run.evaluations[-1][1]
    print(
        f"held-out loss {nats:.3f} nats = {nats / math.log(2):.3f} bits per byte; "
        f"saved in {newest_checkpoint(a.run)}\n"
        f'next: python -m cheems_ref generate --run {a.run} --prompt "..."'
    )
    return 0


def _generate(a):
    model = load_model(a.run, device=_device(a)).eval()
    prompt = text.text_to_ids(a.prompt)[None].to(model.embedding.weight.device)
    generator = torch.Generator(prompt.device)
    if a.seed is None:
        generator.seed()
    else:
        generator.manual_seed(a.seed)
    sampling = Sampling(a.temperature, a.top_k, a.top_p, generator)
    tokens = stream(model, prompt, a.max_new_tokens, sampling)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a letter may take 4 bytes
    sys.stdout.write(a.prompt)
    for token in tokens:
        sys.stdout.write(decoder.decode(bytes(token.tolist())))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    return 0


def _model_config(a):
    if a.preset is not None and a.pattern is not None:
        raise ValueError("give --preset or --pattern, not both; --set changes single numbers")
    base = preset(a.preset) if a.preset else ModelConfig(pattern=a.pattern or "SESESEIE")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    changes = {"vocab_size": 256}  # bytes
    for setting in a.set:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            raise ValueError(f"--set takes NAME=VALUE, {setting!r} is not; names: {sorted(known)}")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value  # a word, such as position=conv
    return dataclasses.replace(base, **changes)


def _device(a):
    if a.device is None:
        return default_device()
    try:
        return torch.empty(0, device=a.device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {a.device} cannot be used: {error}") from error


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m cheems_ref",
        description="Train small language models of the Cheems family, and write with them.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    raw = argparse.RawDescriptionHelpFormatter
    d = TrainConfig()

    p = commands.add_parser("train", help="train a model", description=TRAIN, formatter_class=raw)
    p.set_defaults(command=_train)
    add = p.add_argument
    add("--text", type=Path, metavar="FILE", help="UTF-8 text; without it, Python's own manual")
    add("--run", type=Path, required=True, metavar="DIRECTORY", help="where checkpoints go")
    add("--pattern", help="letters of the layers (default SESESEIE)")
    add("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of ModelConfig")
    add("--steps", type=int, help=f"updates (default {d.steps})")
    add("--batch-size", type=int, help=f"windows per update (default {d.batch_size})")
    add("--length", type=int, help=f"bytes per window (default {d.length})")
    add("--learning-rate", type=float, help=f"the largest (default {d.learning_rate:g})")
    add("--held-out", type=float, help=f"share kept for evaluation (default {d.held_out:g})")
    add("--evaluate-every", type=int, metavar="STEPS", help=f"(default {d.evaluate_every})")
    add("--checkpoint-every", type=int, metavar="STEPS", help=f"(default {d.checkpoint_every})")
    add("--precision", choices=["auto", "float32", "bfloat16"], help="(default auto)")
    add("--seed", type=int, help=f"of the weights and the windows (default {d.seed})")
    add("--device", help="cpu, cuda, mps (default: the fastest there is)")
    add(
        "--bar", action=argparse.BooleanOptionalAction, help="progress bar (default: on a terminal)"
    )

    p = commands.add_parser(
        "generate", help="write with a model", description=GENERATE, formatter_class=raw
    )
    p.set_defaults(command=_generate)
    add = p.add_argument
    add("--run", type=Path, required=True, metavar="DIRECTORY", help="of a run or a checkpoint")
    add("--prompt", default="\n", help="what to write on from (default: a new line)")
    add("--max-new-tokens", type=int, default=400, help="bytes to write (default %(default)s)")
    add("--temperature", type=float, default=0.8, help="0: most likely (default %(default)s)")
    add("--top-k", type=int, help="choose among the k most probable bytes")
    add("--top-p", type=float, help="choose among the bytes that hold this probability")
    add("--seed", type=int, help="the same seed writes the same text")
    add("--device", help="cpu, cuda, mps (default: the fastest there is)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
