"""Chapter 06: the time of a search; lab 06a: which experts fire for which character."""

import time

import torch

from cheems_ref import experts, retrieval
from experiments import preregistered
from experiments.runner import from_notebook, resumed, rounded

LAB = "labs/06a_who_fires_for_what"


def fires():
    """Which experts a trained byte model asks for which character."""
    lab = from_notebook(LAB)
    _, model = lab.train_on_bytes(1500)
    characters = " etaoinshrdlu0123456789.,:()"
    share = lab.fires_for(model, characters)
    most = share.sum(0).argsort(descending=True)[:60]
    rows = torch.arange(len(characters), dtype=share.dtype)
    place = (rows[:, None] * share[:, most]).sum(0) / share[:, most].sum(0)
    most = most[place.argsort()]  # experts of the first characters first
    names = ["space" if c == " " else c for c in characters]
    return {"seed": 0, "characters": names, "share": rounded(share[:, most].tolist())}


def search_times():
    """Milliseconds of a search, and of the neurons it found by bags and by gathered rows."""
    width, sizes = 256, [2**i for i in range(8, 21, 2)]
    x = torch.randn(1, 512, width, generator=torch.Generator().manual_seed(1))
    milliseconds = {"search": [], "neurons by bags": [], "neurons by gathered rows": []}
    for size in sizes:
        torch.manual_seed(0)
        peer = experts.PEER(width, n_experts=size, n_heads=4, k=16, d_query=width)
        with torch.no_grad():
            neurons = (x, peer.down, peer.up, *peer.route(x))
            calls = (
                lambda peer=peer: peer.route(x),
                lambda neurons=neurons: retrieval.retrieved_experts(*neurons),
                lambda neurons=neurons: retrieval.naive_retrieved_experts(*neurons),
            )
            seconds = [[] for _ in calls]
            for _ in range(25):  # in turns, so that all meet the same load
                for call, taken in zip(calls, seconds, strict=True):
                    start = time.perf_counter()
                    call()
                    taken.append(time.perf_counter() - start)
        for times, taken in zip(milliseconds.values(), seconds, strict=True):
            times.append(float(f"{1e3 * min(taken):.3g}"))
    return {"seed": [0, 1], "threads": 1, "experts": sizes, "milliseconds": milliseconds}


def kinship():
    """What experts share under a trained router."""
    return preregistered.expert_kinship(lambda jobs: resumed("06_kinship", jobs, run_on_bytes))


def frequency():
    """Whether what they share is a kind or a frequency."""
    return preregistered.kind_or_frequency(
        lambda jobs: resumed("06_frequency", jobs, run_by_frequency)
    )


def run_on_bytes(job):
    """One training run of lab 06a."""
    lab = from_notebook(LAB)
    return preregistered.kinship_run(job, lab.train_on_bytes, lab.fires_for)


def run_by_frequency(job):
    """One training run of lab 06a, asked for three pairs of kinds."""
    lab = from_notebook(LAB)
    return preregistered.frequency_run(job, lab.train_on_bytes, lab.fires_for)


RECIPES = {
    "06_fires": fires,
    "06_frequency": frequency,
    "06_kinship": kinship,
    "06_rows": search_times,
}
