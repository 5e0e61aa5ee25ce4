"""The command `generate`: text after a prompt, as soon as its bytes are complete."""

import argparse
import codecs
import sys

import torch

from cheems_lab import options
from cheems_lab.checkpoint import load_model
from cheems_ref.model import Sampling, stream


def run(a: argparse.Namespace) -> int:
    """Generate, and write each character as soon as its bytes are complete."""
    device = options.device(a)
    seed = torch.seed() if a.seed is None else a.seed  # torch.seed() differs in each process
    generator = torch.Generator(device).manual_seed(seed)
    sampling = Sampling(a.temperature, a.top_k, a.top_p, generator)
    model = load_model(a.run, device=device).eval()
    ids = torch.tensor([[*a.prompt]], device=device)
    tokens = stream(model, ids, a.max_new_tokens, sampling)
    sys.stdout.write(a.prompt.decode("utf-8", errors="replace"))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # up to 4 bytes a character
    for token in tokens:
        sys.stdout.write(decoder.decode(bytes(token.tolist())))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")
    return 0
