"""Measure training and decoding of whole models: four patterns at equal parameters, and two peers.

    python tests/bench/bench_model.py [--contexts L ...] [--lengths L ...] [--repeats N]
                                      [--no-compiled] [--quick] [--json FILE]

The patterns are those of LlaMa, Mamba-2, Jamba and Cheems, 8 pairs of layers of width 256, d_ff
chosen so that all have the same number of parameters. The peers are transformers' Jamba and Mamba2,
in torch, beside our Cheems and our layers S of the same width, depth, heads, state, and width of
the feed-forward layers; Jamba at two widths, since what takes time is Python at the smaller one and
reading weights at the larger. Decoding is one token at batch 1 after a prompt; training is a
forward and a backward pass over one sequence. The contestants run in turns (see timing.py);
what is printed is the median of the ratios within a turn. A run only reports.
"""

import argparse
import json
import shlex
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from timing import THREADS, describe_machine, paired_ratio, print_row, time_in_turns

from cheems_ref.budget import count_parameters, fit_d_ff
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM, Sampling, stream

WIDTH, PAIRS, HEADS = 256, 8, 4
SHAPE = dict(n_heads=HEADS, d_state=64, n_neurons=1024, k_neurons=8, n_values=16)
CHEEMS, COMPILED = "cheems", "cheems, compiled"
PATTERNS = {
    "llama": dict(pattern=f"AM × {PAIRS}"),
    "mamba2": dict(pattern=f"SM × {PAIRS}", position="conv"),
    "jamba": dict(pattern="SM SR SM SR AM SR SM SR", position="conv"),
    CHEEMS: dict(pattern="SE × 7 + IE"),
}
D_FF, PEER_WIDTHS, PEER_STATE = 512, (256, 512), 16
STEPS = 8  # tokens per timed call

# Of Cheems over transformers' Jamba at a width, at the least.
DECODE_SPEEDUP = {CHEEMS: {256: 2, 512: 2.5}, COMPILED: {256: 3, 512: 3}}
FLATNESS, FLAT_CONTEXTS = 1.1, [256, 8192]  # of a pattern of S and M, at the most


def total(config):
    return sum(part.total for part in count_parameters(config).values())


def at_equal_parameters():
    """The four configurations: Cheems with D_FF, the others as wide as takes them to its count."""
    shape = dict(SHAPE, d_model=WIDTH)
    goal = total(ModelConfig(**shape, **PATTERNS[CHEEMS], d_ff=D_FF))
    return {
        name: fit_d_ff(ModelConfig(**shape, **options), goal) for name, options in PATTERNS.items()
    }


class Compiled(torch.nn.Module):
    """A model that decodes by `stream(..., compile=True)`."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def beside_jamba(width):
    """transformers' Jamba, our Cheems and our Jamba of the same shape, feed-forward 4 × width."""
    from transformers import JambaConfig, JambaForCausalLM

    jamba = JambaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=PAIRS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_experts=16,
        num_experts_per_tok=2,
        mamba_d_state=PEER_STATE,
        use_mamba_kernels=False,
        tie_word_embeddings=True,
    )
    ours = dict(SHAPE, d_model=width, d_state=PEER_STATE, d_ff=4 * width)
    torch.manual_seed(0)
    cheems = CausalLM(ModelConfig(**ours, **PATTERNS[CHEEMS]))
    return {
        "transformers Jamba": JambaForCausalLM(jamba).eval(),
        CHEEMS: cheems,
        COMPILED: Compiled(cheems),
        "jamba": CausalLM(ModelConfig(**ours, **PATTERNS["jamba"], n_experts=16)),
    }


def beside_mamba2(width):
    """transformers' Mamba2, whose layers have no feed-forward part, and our S alone."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    mamba2 = Mamba2Config(
        vocab_size=256,
        hidden_size=width,
        num_hidden_layers=PAIRS,
        expand=1,
        num_heads=HEADS,
        head_dim=width // HEADS,
        state_size=SHAPE["d_state"],
        n_groups=1,
        chunk_size=64,
        tie_word_embeddings=True,
    )
    ours = ModelConfig(**SHAPE, d_model=width, pattern=f"S × {PAIRS}", position="conv")
    torch.manual_seed(0)
    return {"transformers Mamba2": Mamba2ForCausalLM(mamba2).eval(), "S alone": CausalLM(ours)}


def prompt(length):
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))


def decoding(model, context):
    """Return a call that decodes STEPS tokens after so many."""
    ids = prompt(context)
    token = ids[:, :1]

    if isinstance(model, Compiled):  # here, too, the cache grows from call to call
        steps = stream(model.model, ids, sys.maxsize, Sampling(temperature=0), compile=True)
        next(steps)
        return lambda: [next(steps) for _ in range(STEPS)]

    @torch.inference_mode()
    def ours():
        after = cache
        for _ in range(STEPS):
            _, after = model(token, cache=after)

    @torch.inference_mode()
    def theirs():  # the cache grows from call to call, by what is little beside the prompt
        for _ in range(STEPS):
            model(token, use_cache=True, **{key: kept})

    with torch.inference_mode():
        if not hasattr(model, "generation_config"):  # which transformers' models have
            _, cache = model(ids)
            return ours
        output = model(ids, use_cache=True)
        key = "past_key_values" if hasattr(output, "past_key_values") else "cache_params"
        kept = output[key]
        return theirs


def training(model, length):
    """Return a call that goes forward and backward over so many tokens."""
    ids = prompt(length + 1)

    def step():
        model.zero_grad()
        output = model(ids[:, :-1], use_cache=False)
        logits = output[0] if isinstance(output, tuple) else output.logits
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()

    return step


def measure(title, models, make_task, sizes, repeats, steps, against):
    """Time all models at all sizes; print ms per step and ratios to one of them."""
    print(f"\n{title}, median of {repeats} turns; x is time against {against} in the same turn")
    print(f"  {'':22}{'parameters':>12}" + "".join(f"{size:>20,}" for size in sizes))
    columns = []
    for size in sizes:
        tasks = {name: make_task(model, size) for name, model in models.items()}
        columns.append(time_in_turns(tasks, repeats, f"{title}, {size}"))
    seconds = {name: [median(column[name]) / steps for column in columns] for name in models}
    for name, model in models.items():
        ratios = [paired_ratio(column[name], column[against]) for column in columns]
        count = sum(parameter.numel() for parameter in model.parameters())
        cells = [
            f"{1e3 * s:9.2f} ms{ratio:6.2f}x"
            for s, ratio in zip(seconds[name], ratios, strict=True)
        ]
        print(f"  {name:22}{count:>12,}" + "".join(f"{cell:>20}" for cell in cells))
    milliseconds = {
        name: [float(f"{1e3 * s:.3g}") for s in values] for name, values in seconds.items()
    }
    return columns, {"sizes": sizes, "milliseconds": milliseconds}


def flatness(model, contexts, repeats):
    """Time per token at the last context over that at the first, in the same turns."""
    tasks = {context: decoding(model, context) for context in contexts}
    times = time_in_turns(tasks, repeats, "flatness")
    return paired_ratio(times[contexts[-1]], times[contexts[0]])


def main():
    parser = argparse.ArgumentParser(description="Measure whole models.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 8192])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=15, help="turns per measurement")
    parser.add_argument("--no-compiled", action="store_true", help="leave compiled models out")
    parser.add_argument("--quick", action="store_true", help="seconds only, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the times there")
    a = parser.parse_args()
    if a.quick:
        a.contexts, a.lengths, a.repeats = [64, 128], [64], 2
    warnings.filterwarnings("ignore")  # of transformers, that its fast kernels are not there
    from transformers.utils import logging

    torch.set_num_threads(THREADS)
    machine = describe_machine()
    print(f"whole models, b=1 d={WIDTH}, {PAIRS} pairs, float32, {THREADS} threads")
    print(f"{machine['cpu']}, {machine['cores']} cores, load before {machine['load before']:.1f}")
    torch.manual_seed(0)
    configs = at_equal_parameters()
    models = {name: CausalLM(config) for name, config in configs.items()}
    few = max(2, a.repeats // 3)
    record = {"command": shlex.join(["python", "tests/bench/bench_model.py", *sys.argv[1:]])}
    record |= {"date": datetime.now(UTC).date().isoformat(), "machine": machine}
    record["d_ff"] = {name: config.d_ff for name, config in configs.items()}

    _, record["decoding"] = measure(
        "Decoding, ms per token after", models, decoding, a.contexts, a.repeats, STEPS, "llama"
    )
    _, record["training"] = measure(
        "Training, ms per sequence of", models, training, a.lengths, few, 1, "llama"
    )
    logging.set_verbosity_error()
    rows, record["peers"] = [], []
    for width, make_peers in [(w, beside_jamba) for w in PEER_WIDTHS] + [(WIDTH, beside_mamba2)]:
        contestants = make_peers(width)
        if a.no_compiled:
            contestants.pop(COMPILED, None)
        peer = next(iter(contestants))
        title = f"Width {width}: decoding, ms per token after"
        contexts = a.contexts[:2]
        columns, decode = measure(title, contestants, decoding, contexts, a.repeats, STEPS, peer)
        title = f"Width {width}: training, ms per sequence of"
        contestants.pop(COMPILED, None)  # compiling training as well would take minutes
        _, train = measure(title, contestants, training, a.lengths[:1], 2, 1, peer)
        record["peers"].append({"width": width, "decoding": decode, "training": train})
        for context, column in zip(contexts, columns, strict=True):
            for name in DECODE_SPEEDUP.keys() & column.keys():
                ratio = paired_ratio(column[peer], column[name])
                label = f"{name}, width {width}, after {context:,}"
                rows.append((label, ratio, DECODE_SPEEDUP[name][width]))
    print("\nTargets; Cheems against transformers' Jamba")
    for label, ratio, least in sorted(rows):
        print_row(label, f"{ratio:.2f}x", ratio >= least, f">= {least}x")
    contexts = FLAT_CONTEXTS if not a.quick else a.contexts
    ratio = flatness(models["mamba2"], contexts, a.repeats)
    label = f"S and M: time per token at {contexts[-1]:,} over {contexts[0]:,}"
    print_row(label, f"{ratio:.2f}x", ratio <= FLATNESS, f"<= {FLATNESS}x")
    if a.json:
        a.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
