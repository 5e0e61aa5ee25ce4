"""Chapter 07: what learns recall, and a Cheems trained on Python's manual."""

import dataclasses

import torch

from cheems_ref import text
from cheems_ref import train as training
from cheems_ref.budget import count_parameters
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM, Sampling, generate
from experiments import preregistered
from experiments.runner import from_notebook, resumed

CHAPTER = "07_cheems_language_model"


def train_on_manual():
    """A Cheems of eight pairs of layers, trained on Python's manual, and what it writes."""
    ids = text.text_to_ids(text.read_text())
    config = ModelConfig(pattern="SE × 7 + IE", d_model=128, d_ff=256, n_neurons=1024, k_neurons=8)
    torch.manual_seed(0)
    cheems = CausalLM(config)
    settings = training.TrainConfig(
        steps=2500, batch_size=8, seq_len=256, learning_rate=3e-3, evaluate_every=125
    )
    run = training.train(cheems, ids, settings, progress_bar=True)
    samples = []
    for prompt in ("The ", "If the class", "An exception"):
        start = text.text_to_ids(prompt)[None]
        generator = torch.Generator().manual_seed(0)
        choice = Sampling(temperature=0.7, top_p=0.95, generator=generator)
        new = generate(cheems, start, 320, choice)
        samples.append([prompt, text.ids_to_text(new[0])])
    seen, held_out = training.split_text(ids, settings.eval_fraction)
    pairs = torch.full((256, 256), 0.1).index_put(
        (seen[:-1], seen[1:]), torch.ones(len(seen) - 1), accumulate=True
    )
    bigram = -(pairs / pairs.sum(1, keepdim=True))[held_out[:-1], held_out[1:]].log().mean()
    counts = count_parameters(config).values()
    return {
        "seed": 0,
        "bigram": round(bigram.item(), 4),
        "pattern": config.pattern,
        "parameters": sum(count.total for count in counts),
        "settings": dataclasses.asdict(settings),
        "bytes": len(ids),
        "losses": [round(loss, 3) for loss in run.losses[::5]],
        "evaluations": [[step, round(nats, 4)] for step, nats in run.evaluations],
        "samples": samples,
    }


def recall_controlled():
    """Whether a state learns recall, or a look at the neighbour."""
    return preregistered.state_or_neighbour(
        lambda jobs: resumed("07_state_or_neighbour", jobs, run_recall)
    )


def run_recall(job):
    """One training run of chapter 07's recall."""
    return preregistered.recall_run(job, from_notebook(CHAPTER).learn_to_recall)


RECIPES = {
    "07_state_or_neighbour": recall_controlled,
    "07_training": train_on_manual,
}
