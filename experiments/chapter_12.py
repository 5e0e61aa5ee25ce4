"""Chapter 12's map of the claims: how fast are layers that the papers call fast?"""

import time

import torch
import torch.nn.functional as F

from cheems_ref.experts import PEER, CDMMoE, CohesiveMoE, ExpansiveMoE, MoE
from cheems_ref.feed_forward import DGLU
from cheems_ref.model import CausalLM
from cheems_ref.ssd import SSD
from experiments import preregistered
from experiments.runner import from_notebook

TURNS, TOKENS, WIDTH = 25, 512, 256


def layer_times():
    """Milliseconds of forward passes, turn by turn: experts, and sources of position."""
    torch.manual_seed(0)
    return {
        "prediction": " ".join(preregistered.SPEED_PREDICTION.split()),
        "seed": 0,
        "threads": 1,
        "clock": "processor time",
        "tokens": TOKENS,
        "many experts": in_turns(many_experts(), WIDTH),
        "kinds": in_turns(kinds_of_experts(), WIDTH),
        "positions": in_turns(sources_of_position(), WIDTH),
        "1,024 times": in_turns(from_4_to_4096(), 1024),
    }


def many_experts():
    """Routed DGLUs of 32 neurons, 2 per token, and a retrieval of 4 heads, 16 neurons each."""
    routed = {e: MoE(WIDTH, 32, n_experts=e, k=2) for e in (16, 256, 4096)}
    retrieval = dict(n_heads=4, k=16, d_query=WIDTH)
    retrieved = {e: PEER(WIDTH, n_experts=e, **retrieval) for e in (256, 4096, 65536)}
    layers = {f"routed, {e}": layer for e, layer in routed.items()}
    layers |= {f"retrieved, {e}": layer for e, layer in retrieved.items()}
    layers |= {f"router, {e}": layer.route for e, layer in routed.items()}
    return layers | {f"search, {e}": layer.route for e, layer in retrieved.items()}


def kinds_of_experts():
    """Cohesive and expansive layers of equal width and of equal size, 2 experts per token."""
    layers = {}
    for e in (4, 8):
        expansive = ExpansiveMoE(WIDTH, WIDTH, n_experts=e, k=2)
        size = sum(parameter.numel() for parameter in expansive.parameters())
        wider = round((size - WIDTH * e) / (WIDTH * (2 * e + 1)))  # a router, one V, e of W and W_2
        layers[f"expansive, {e}"] = expansive
        layers[f"cohesive, {e}"] = CohesiveMoE(WIDTH, WIDTH, n_experts=e, k=2)
        layers[f"cohesive of equal size, {e}"] = CohesiveMoE(WIDTH, wider, n_experts=e, k=2)
    return layers


def sources_of_position():
    """One state layer with each source of position."""
    positions = torch.arange(TOKENS)[None]
    layers = {
        source: SSD(WIDTH, n_heads=4, d_state=64, position=source)
        for source in ("decay", "rope", "conv")
    }
    return {source: lambda x, layer=layer: layer(x, positions) for source, layer in layers.items()}


def from_4_to_4096():
    """OTCE's layer with 4 experts, whose shared expert is as wide as Ch's, and Ch's with 4,096."""
    expansive = ExpansiveMoE(1024, 2048, n_experts=4, k=2)
    expansive.shared = DGLU(1024, 4096)
    sizes = dict(d_ff=4096, d_private=2048, n_experts=4096, k=8, d_query=2048)
    cdmmoe = {f"CDMMoE, {h} heads": CDMMoE(1024, n_heads=h, **sizes) for h in (1, 2)}
    return {"expansive": expansive} | cdmmoe


def system_times():
    """Processor time per pass of whole systems, in training and in evaluation, turn by turn."""
    chapter = from_notebook("09_ablations")
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    rows = {name: chapter.SYSTEMS[name] for name in ("Jamba", "OTCE", "Cheems")}
    rows |= preregistered.CHEEMS_OF_CH
    models = {name: CausalLM(chapter.fitted(**fields)) for name, fields in rows.items()}
    seconds = {
        f"{mode}, {length}": {name: [] for name in models}
        for mode in ("training", "evaluation")
        for length in (1024, 4096, 8192)
    }
    for turn in range(6):  # one to warm up
        for setting, taken in seconds.items():
            mode, length = setting.split(", ")
            ids = torch.randint(256, (1, int(length)))
            for name, model in models.items():
                start = time.process_time()
                one_pass(model, ids, mode)
                if turn:
                    taken[name].append(float(f"{time.process_time() - start:.4g}"))
    prediction = " ".join(preregistered.SYSTEM_TIMES_PREDICTION.split())
    return {"prediction": prediction, "seed": 0, "threads": 1, "seconds": seconds}


def one_pass(model, ids, mode):
    """A forward pass, and in training a backward pass of the loss."""
    with torch.set_grad_enabled(mode == "training"):
        logits, _ = model(ids, use_cache=False)
        if mode == "training":
            F.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
            model.zero_grad()


@torch.no_grad()
def in_turns(calls, width):
    """Milliseconds of processor time: every call once per turn, so that all meet the same load."""
    x, taken = torch.randn(1, TOKENS, width), {name: [] for name in calls}
    for turn in range(TURNS + 2):  # two to warm up
        for name, call in calls.items():
            start = time.process_time()
            call(x)
            if turn > 1:
                taken[name].append(float(f"{1e3 * (time.process_time() - start):.4g}"))
    return taken


RECIPES = {"12_layer_times": layer_times, "12_system_times": system_times}
