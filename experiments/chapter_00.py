"""Chapter 00: a Cheems beside models without its mixture; a state layer that learns to repeat."""

import torch

from cheems_ref import minimal, text
from experiments import preregistered
from experiments.runner import from_notebook, jobs_and_results

CHAPTER = "00_cheems_in_one_sitting"


def sitting():
    """minimal's Cheems and two models without its mixture, trained as that file trains its own."""
    jobs = [dict(pattern=pattern) for pattern in ("SESEIE", "SESESE", "IEIEIE")]
    return {"seed": 0, "steps": 300, "runs": jobs_and_results("00_sitting", sitting_run, jobs)}


def sitting_seeds():
    """Two more seeds of minimal's Cheems and of the model without attention."""
    jobs = [dict(pattern=p, seed=seed) for seed in (1, 2) for p in ("SESEIE", "SESESE")]
    return {"steps": 300, "table": jobs_and_results("00_sitting_seeds", held_out_run, jobs)}


def sitting_longer():
    """Four times the training, with three seeds; without states one."""
    jobs = [dict(pattern=p, seed=seed) for seed in (1, 2, 0) for p in ("SESEIE", "SESESE")]
    jobs = [job | dict(steps=1200) for job in [*jobs, dict(pattern="IEIEIE", seed=0)]]
    return predicted(preregistered.LONGER_PREDICTION, "00_sitting_longer", longer_run, jobs)


def longer_run(job):
    """The nats per byte of one training run on held-out text, and without what its I add."""
    run = sitting_run(job)
    return {name: run[name] for name in ("held_out", "held_out_off")}


def held_out_run(job):
    """The nats per byte of one training run, on held-out text."""
    return {"held_out": sitting_run(job)["held_out"]}


def sitting_run(job):
    """One training run: losses, a sample, and nats per byte by place, each part of I on and off.

    Held-out windows are read as they are, and with their first half in place of the second.
    """
    torch.manual_seed(job.get("seed", 0))
    ids = text.text_to_ids(text.read_text())
    seen, held_out = ids.tensor_split([len(ids) * 9 // 10])
    model = minimal.Cheems(job["pattern"])
    losses = list(minimal.train(model, seen, job.get("steps", 300)))
    torch.set_grad_enabled(False)
    windows = held_out.unfold(0, minimal.LENGTH + 1, minimal.LENGTH)
    half = minimal.LENGTH // 2
    texts = {"plain": windows, "twice": torch.cat([windows[:, :half], windows[:, :half]], dim=1)}
    found = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": [round(loss, 3) for loss in losses],
        "held_out": round(minimal.nats(model, windows).item(), 4),
        "sample": minimal.write(model, "The ", 300),
        "on": {name: nats_by_place(model, ids) for name, ids in texts.items()},
    }
    for letter, block in zip(job["pattern"], model.blocks, strict=True):
        if letter == "I":
            block["layer"].out_proj.weight.zero_()
    found["held_out_off"] = round(minimal.nats(model, windows).item(), 4)
    found["off"] = {name: nats_by_place(model, ids) for name, ids in texts.items()}
    torch.set_grad_enabled(True)
    return found


def nats_by_place(model, windows, places=16):
    """Nats per byte, in the mean over windows and over so many places that follow one another."""
    log_p = model(windows[:, :-1]).log_softmax(-1)
    losses = -log_p.gather(-1, windows[:, 1:, None])[..., 0].mean(0)
    return [round(piece.mean().item(), 3) for piece in losses.split(places)]


def repeats():
    """A state layer that learns to repeat what it has read, at three lengths."""
    lengths = [dict(pattern="S", length=length) for length in (16, 32, 64)]
    jobs = [job | dict(steps=1000, seed=seed) for job in lengths for seed in range(3)]
    return {"table": jobs_and_results("00_repeat", repeat_run, jobs)}


def repeat_run(job):
    """One run of chapter 00's last section: the share right in every ten steps."""
    _, curve = from_notebook(CHAPTER).learn_to_repeat(**job)
    return {"right": [round(right, 3) for right in curve]}


def predicted(prediction, name, run, jobs):
    """A record's prediction, in one line, and the table of its runs."""
    return {"prediction": " ".join(prediction.split()), "table": jobs_and_results(name, run, jobs)}


def repeats_slower():
    """The same state layer, with decays that are 30 times slower when training begins."""
    lengths = [dict(pattern="S", length=length, slower=30) for length in (16, 32, 64)]
    jobs = [job | dict(steps=1000, seed=seed) for job in lengths for seed in range(3)]
    return predicted(preregistered.SLOWER_PREDICTION, "00_repeat_slower", repeat_run, jobs)


def repeats_wider():
    """The same state layer with a wider state, and the slow decays or its usual ones."""
    kinds = [
        dict(length=64, wider=4, slower=30, steps=500),
        dict(length=32, wider=2, slower=30, steps=500),
        dict(length=64, wider=4, slower=1, steps=1000),
    ]
    jobs = [dict(pattern="S", seed=seed) | kind for kind in kinds for seed in preregistered.SEEDS]
    return predicted(preregistered.WIDER_PREDICTION, "00_repeat_wider", repeat_run, jobs)


def repeats_room():
    """The widest state with slow decays, turned by the frequencies of the narrow one."""
    jobs = [
        dict(pattern="S", length=64, wider=4, slower=30, steps=500, seed=seed)
        for seed in preregistered.SEEDS
    ]
    return predicted(preregistered.ROOM_PREDICTION, "00_repeat_room", room_run, jobs)


def room_run(job):
    """One run of the section in which four parts of a key are turned alike."""
    learn_to_repeat = from_notebook(CHAPTER).learn_to_repeat
    names = learn_to_repeat.__globals__
    rotate, wider = names["rotate"], job["wider"]
    names["rotate"] = lambda x: torch.cat([rotate(part) for part in x.chunk(wider, dim=-1)], -1)
    _, curve = learn_to_repeat(**job)
    return {"right": [round(right, 3) for right in curve]}


def repeats_spaced():
    """The narrow state with slow decays, and 16 frequencies that turn faster."""
    jobs = [
        dict(pattern="S", length=64, slower=30, steps=500, seed=seed, spacing=spacing)
        for spacing in ("even", "base 100")
        for seed in preregistered.SEEDS
    ]
    return predicted(preregistered.SPACED_PREDICTION, "00_repeat_spaced", spaced_run, jobs)


def spaced_run(job):
    """One run of the section with other frequencies."""
    learn_to_repeat = from_notebook(CHAPTER).learn_to_repeat
    pairs = torch.arange(16)
    even, slow = torch.pi * (pairs + 0.5) / 16, 100.0 ** (-pairs / 16)
    frequency = {"even": even, "base 100": slow}[job["spacing"]]

    def rotate(x):
        angle = torch.arange(x.shape[-2])[:, None] * frequency.to(x)
        cos, sin, (first, second) = angle.cos().to(x), angle.sin().to(x), x.chunk(2, dim=-1)
        return torch.cat([cos * first - sin * second, sin * first + cos * second], dim=-1)

    learn_to_repeat.__globals__["rotate"] = rotate
    _, curve = learn_to_repeat(**{name: job[name] for name in job if name != "spacing"})
    return {"right": [round(right, 3) for right in curve]}


def windows():
    """minimal's Cheems, whose attention then sees only the last bytes of a text."""
    jobs = [dict(pattern="SESEIE", seed=seed) for seed in (0, 1, 2)]
    return predicted(preregistered.WINDOW_PREDICTION, "00_sitting_window", window_run, jobs)


def window_run(job):
    """Nats per byte on held-out text, by how many bytes attention sees: 0 is none, None all."""
    torch.manual_seed(job["seed"])
    ids = text.text_to_ids(text.read_text())
    seen, held_out = ids.tensor_split([len(ids) * 9 // 10])
    model = minimal.Cheems(job["pattern"])
    for _ in minimal.train(model, seen, 300):
        pass
    texts = held_out.unfold(0, minimal.LENGTH + 1, minimal.LENGTH)
    whole, found = minimal.attention, []

    def nearby(q, k, v):
        """Equation 0.1, for keys at most so many bytes back."""
        scores = q @ k.mT / q.shape[-1] ** 0.5
        one = torch.ones_like(scores[0, 0])
        hidden = (one.triu(1) + one.tril(-width)).bool()
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    with torch.no_grad():
        for width in (4, 8, 16, 32, 64):
            minimal.attention = nearby
            found.append([width, round(minimal.nats(model, texts).item(), 4)])
        minimal.attention = whole
        found.append([None, round(minimal.nats(model, texts).item(), 4)])
        for letter, block in zip(job["pattern"], model.blocks, strict=True):
            if letter == "I":
                block["layer"].out_proj.weight.zero_()
        found.append([0, round(minimal.nats(model, texts).item(), 4)])
    return {"held_out": found}


def repeats_unturned():
    """The state layer with slow decays and without its rotation, at the shortest length."""
    jobs = [
        dict(pattern="S", length=16, slower=30, steps=500, seed=seed)
        for seed in preregistered.SEEDS
    ]
    return predicted(preregistered.UNTURNED_PREDICTION, "00_repeat_unturned", unturned_run, jobs)


def unturned_run(job):
    """One run of the section with a layer that doesn't rotate."""
    learn_to_repeat = from_notebook(CHAPTER).learn_to_repeat
    learn_to_repeat.__globals__["rotate"] = lambda x: x
    _, curve = learn_to_repeat(**job)
    return {"right": [round(right, 3) for right in curve]}


def repeats_by_attention():
    """One layer of attention that learns to repeat, at the same lengths."""
    jobs = [
        dict(pattern="I", length=length, steps=300, seed=seed)
        for length in (16, 32, 64)
        for seed in preregistered.SEEDS
    ]
    return predicted(preregistered.REPEAT_PREDICTION, "00_repeat_attention", repeat_run, jobs)


RECIPES = {
    "00_sitting": sitting,
    "00_sitting_seeds": sitting_seeds,
    "00_repeat": repeats,
    "00_repeat_attention": repeats_by_attention,
    "00_repeat_slower": repeats_slower,
    "00_repeat_wider": repeats_wider,
    "00_repeat_room": repeats_room,
    "00_repeat_unturned": repeats_unturned,
    "00_repeat_spaced": repeats_spaced,
    "00_sitting_window": windows,
    "00_sitting_longer": sitting_longer,
}
