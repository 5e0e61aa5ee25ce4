"""Generate text after a prompt, with a model that "train" made.

examples:
  cheems generate --run runs/book --prompt "It was"
  cheems generate --run runs/book --prompt "It was" --temperature 0   (most likely)
  cheems generate --run runs/book --max-new-tokens 2000 --seed 1 > text
"""

import argparse
import codecs
import sys

import torch

from cheems_lab import options
from cheems_lab.checkpoint import load_model
from cheems_lab.options import BYTES
from cheems_ref import text
from cheems_ref.model import Sampling, stream


def add_options(commands) -> None:
    """Add the command to a parser."""
    add = options.add_command(commands, "generate", run, __doc__)
    add("--run", required=True, type=options.nonempty, metavar="DIRECTORY",
        help="a run, or one of its checkpoints")  # fmt: skip
    add("--prompt", type=options.nonempty, default="\n",
        help="the text to continue (default: a new line)")  # fmt: skip
    add("--max-new-tokens", type=options.at_least(0), default=400,
        help="bytes to generate (default %(default)s)")  # fmt: skip
    add("--temperature", type=float, default=0.8, help="0: most likely (default %(default)s)")
    add("--top-k", type=options.at_least(1, BYTES), help="choose among the k most probable bytes")
    add("--top-p", type=float, help="choose among the bytes that hold this probability")
    add("--seed", type=options.SEED, help="the same seed generates the same text")
    options.add_device(add)


def run(a: argparse.Namespace) -> int:
    """Generate, and write each character as soon as its bytes are complete."""
    device = options.device(a)
    seed = torch.seed() if a.seed is None else a.seed  # torch.seed() differs in each process
    generator = torch.Generator(device).manual_seed(seed)
    sampling = Sampling(a.temperature, a.top_k, a.top_p, generator)
    model = load_model(a.run, device=device).eval()
    ids = text.text_to_ids(a.prompt)[None].to(device)
    tokens = stream(model, ids, a.max_new_tokens, sampling)
    sys.stdout.write(a.prompt)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # up to 4 bytes a character
    for token in tokens:
        sys.stdout.write(decoder.decode(bytes(token.tolist())))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    return 0
