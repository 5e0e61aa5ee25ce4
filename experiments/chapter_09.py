"""Chapter 09: ablations; lab 09a: filling in blanks."""

import dataclasses
import functools
import statistics
import time

import torch

from cheems_ref import text
from cheems_ref import train as training
from experiments import preregistered
from experiments.runner import from_notebook, jobs_and_results

CHAPTER = "09_ablations"
RECALL = "07_cheems_language_model"  # whose recall the orders learn, too
LAB = "labs/09a_filling_in_blanks"


def ablation_inner():
    """Three inner functions in a hybrid of a million parameters, six seeds."""
    return ablation("09_inner", from_notebook(CHAPTER).INNER, range(1, 7))


def ablation_position():
    """Where state layers and attention take positions from, three seeds."""
    return ablation("09_position", from_notebook(CHAPTER).position_rows(), range(1, 4), 200)


def ablation_longer():
    """Convolution against rotation once more, in three times as many updates, three seeds."""
    rows = from_notebook(CHAPTER).position_rows()
    two = {f"S + A, {source}": rows[f"S + A, {source}"] for source in ("conv", "rope")}
    return ablation("09_longer", two, range(3), 600, rates=(3e-3,))


def ablation_orders():
    """Jamba's order, OTCE's, and one with as much attention, six seeds; and chapter 07's recall."""
    chapter = from_notebook(CHAPTER)
    recalling = chapter.RECALLING
    record = ablation("09_orders", chapter.ORDERS, range(1, 7), 200)
    parts = ((400, range(6), recalling), (1200, range(3), ("Jamba", "OTCE")))
    jobs = [
        dict(row=row, pattern=recalling[row], steps=steps, seed=seed)
        for steps, seeds, several in parts
        for seed in seeds
        for row in several
    ]
    recalled = jobs_and_results("09_orders_recall", order_recall_run, jobs)
    minutes = sum(one["minutes"] for one in recalled)
    hours = round(record["core hours"] + minutes / 60, 1)
    return record | {"core hours": hours, "recall": recalled}


def order_recall_run(job):
    """One training run of chapter 07's recall: minutes, and the share right every 25 steps."""
    learn = from_notebook(RECALL).learn_to_recall
    start = time.perf_counter()
    _, right = learn(job["pattern"], job["steps"], "conv", job["seed"])
    minutes = round((time.perf_counter() - start) / 60, 2)
    return {"minutes": minutes, "right": [round(share, 3) for share in right]}


def ablation_experts():
    """MLP and CDMoE in the six patterns of WM's Table 2, three seeds."""
    return ablation("09_experts", from_notebook(CHAPTER).EXPERTS, range(1, 4), 200)


def ablation_routed():
    """DGLU and routed MoE in the seventeen patterns of OTCE's Table 5, smaller, three seeds."""
    return ablation("09_routed", from_notebook(CHAPTER).ROUTED, range(3), 100, rates=(3e-3,))


def ablation_shared():
    """What experts share, seven kinds and none, three seeds."""
    return ablation("09_shared", from_notebook(CHAPTER).SHARED, range(1, 4), 200)


def ablation_gated():
    """Experts, MLP and DGLU once more, on seeds that no table has seen."""
    shared = from_notebook(CHAPTER).SHARED
    rows = {row: shared[row] for row in preregistered.GATED}
    how = dict(rates=(1e-3, 3e-3, 1e-2, 3e-2), tuning=(0, 9))
    record = ablation("09_gated", rows, range(11, 16), 200, **how)
    return {"prediction": " ".join(preregistered.GATED_PREDICTION.split()), **record}


def ablation_systems():
    """The papers' systems, whole, and two of them with the other's source of position."""
    rows = from_notebook(CHAPTER).SYSTEMS
    record = ablation("09_systems", rows, range(1, 6), 200, tuning=(0, 6))
    return {"prediction": " ".join(preregistered.SYSTEMS_PREDICTION.split()), **record}


def ablation_systems_longer():
    """Three whole systems for five times as many updates, at the rates of the shorter runs."""
    systems = from_notebook(CHAPTER).SYSTEMS
    rows = {row: systems[row] for row in preregistered.LONGER}
    record = ablation("09_systems_longer", rows, range(1, 4), 1000, rates=(3e-3,))
    return {"prediction": " ".join(preregistered.LONGER_PREDICTION.split()), **record}


def ablation_reading():
    """Texts in order and texts with blanks, in three patterns, three seeds."""
    lab = from_notebook(LAB)
    rows = {
        f"{name}, {objective}": dict(pattern=lab.PATTERNS[name], objective=objective)
        for name, several in lab.OBJECTIVES.items()
        for objective in several
    }
    return ablation("09_reading", rows, range(1, 4), 200, reading_run)


def ablation(name, rows, seeds, steps=300, run_one=None, rates=None, tuning=(0,)):
    """Every row at the best of several rates, tried with the tuning seeds, or at a given one."""
    if rates is None:
        rates = from_notebook(CHAPTER).RATES
    settings = ablation_settings(steps)
    size = dict(steps=settings.steps, batch_size=settings.batch_size, seq_len=settings.seq_len)

    def run(jobs):
        return jobs_and_results(name, run_one or ablation_run, jobs)

    trials = [
        dict(row=row, fields=fields, rate=rate, seed=seed, **size)
        for seed in tuning
        for row, fields in rows.items()
        for rate in rates
    ]
    tried, best = run(trials) if len(rates) > 1 else [], dict.fromkeys(rows, rates[0])
    ends = {}
    for one in tried:
        ends.setdefault((one["row"], one["rate"]), []).append(one["nats"][-1][1])
    if tried:
        best = {row: min(rates, key=lambda rate: statistics.fmean(ends[row, rate])) for row in rows}
    jobs = [
        dict(row=row, fields=fields, rate=best[row], seed=seed, **size)
        for seed in seeds
        for row, fields in rows.items()
    ]
    runs = run(jobs)
    corpus = ablation_corpus()
    return {
        "seed": sorted({one["seed"] for one in tried + runs}),
        "core hours": round(sum(one["minutes"] for one in tried + runs) / 60, 1),
        "text": {
            "sha256": text.fingerprint(corpus.ids),
            "bytes": len(corpus.ids),
            "texts to train on, held out": list(corpus.texts),
        },
        "training": dataclasses.asdict(settings),
        "best": best,
        "rates": tried,
        "runs": runs,
    }


def ablation_settings(steps):
    """How the runs of so many steps are trained."""
    chapter = from_notebook(CHAPTER)
    return chapter.BY_STEPS.get(steps, chapter.TRAINING)


@functools.cache
def ablation_corpus():
    return text.read_corpus(eval_fraction=ablation_settings(300).eval_fraction)


def ablation_run(job):
    """One training run of chapter 09: minutes, parameters, and held-out nats over time."""
    chapter = from_notebook(CHAPTER)
    corpus, start, models = ablation_corpus(), time.perf_counter(), []
    settings = ablation_settings(job["steps"])
    torch.set_default_dtype(torch.float32)
    settings = dataclasses.replace(settings, eval_fraction=corpus.eval_fraction)
    fields = dict(job["fields"])
    turned = fields.pop("turned", True)
    config = chapter.fitted(**fields)

    def at_start(name, run):
        models.append(run.model)
        if not turned:
            chapter.unturned(run.model)

    how = (job["rate"], job["seed"], settings, corpus.ids, at_start)
    nats = chapter.one_run(job["row"], config, *how)
    result = {
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "parameters": chapter.parameters(config),
        "d_ff": config.d_ff,
        "nats": [[step, round(loss, 5)] for step, loss in nats],
    }
    if set(config.pattern) & set("RHCX"):
        held_out = training.split_text(corpus.ids, corpus.eval_fraction)[1]
        shares = chapter.in_common(models[0], held_out[: 4 * 512].view(4, 512).long())
        result["in common"] = [round(share, 4) for share in shares]
    return result


def reading_run(job):
    """One training run of lab 09a: minutes, and held-out nats of what is cut out."""
    lab = from_notebook(LAB)
    corpus, start = ablation_corpus(), time.perf_counter()
    settings = ablation_settings(job["steps"])
    settings = dataclasses.replace(settings, learning_rate=job["rate"], seed=job["seed"])
    torch.set_default_dtype(torch.float32)
    ids, held_out = training.split_text(corpus.ids.long(), corpus.eval_fraction)
    objective = job["fields"]["objective"]
    reader = lab.learn_to_read(job["fields"]["pattern"], objective, settings, ids)
    nats, places = lab.nats_cut_out(reader, objective, held_out)
    return {
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "parameters": sum(parameter.numel() for parameter in reader.parameters()),
        "d_ff": reader.model.config.d_ff,
        "nats": [[settings.steps, round(nats.mean().item(), 5)]],
        "by place": [round(nats[places == place].mean().item(), 5) for place in range(1, 7)],
    }


RECIPES = {
    "09_inner": ablation_inner,
    "09_position": ablation_position,
    "09_longer": ablation_longer,
    "09_orders": ablation_orders,
    "09_reading": ablation_reading,
    "09_experts": ablation_experts,
    "09_routed": ablation_routed,
    "09_shared": ablation_shared,
    "09_gated": ablation_gated,
    "09_systems": ablation_systems,
    "09_systems_longer": ablation_systems_longer,
}
