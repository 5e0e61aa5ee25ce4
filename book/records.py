"""Write the records that figures are drawn from where a live run would not be reproducible.

    python book/records.py NAME ...

A record holds what a figure shows, and how it came about: command, machine, versions, date.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import datetime
import functools
import itertools
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import controls
import torch
import torch.distributed as dist

from cheems_ref import experts, kernels, linear_attention, minimal, retrieval, rope, ssd, text
from cheems_ref import train as training
from cheems_ref.budget import count_parameters
from cheems_ref.config import ModelConfig
from cheems_ref.model import CausalLM, Sampling, generate

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "figures" / "records"
CHAPTER_0 = "00_cheems_in_one_sitting"
REPEAT_RUN = "D_MODEL", "N_VALUES", "Linear", "heads", "ssd", "rotate", "SSD"
REPEAT_RUN += ("attention", "RetrievedValues", "InnerFuncAttn", "best_pairs", "PEER", "CDMoE")
REPEAT_RUN += ("Cheems", "learn_to_repeat")
CHAPTER_5 = "05_inner_function_attention"
LOOK_BACK = ("look_back_model", "look_back_batch", "train_to_look_back")  # of chapter 04
LAB_6A = "labs/06a_who_fires_for_what"
CHAPTER_7 = "07_cheems_language_model"
CHAPTER_8 = "08_associative_recall"
LAB_8A = "labs/08a_needle"
RECALL = "recall", "wipe", "recall_model", "share_right", "learn_to_recall"
RECALL_GRID = "LENGTHS", "SYSTEMS", "RATES", "WITH_POSITION"  # of chapter 08
RECALL_RUN = "LENGTHS", "recall_model", "recall_batch", "answers", "share_right", "learn_to_recall"
CHAPTER_9 = "09_ablations"
ABLATION_RUN = ("TRAINING", "BY_STEPS", "SIZES", "MILLION", "parameters", "fitted", "one_run")
ABLATION_RUN += ("unturned", "common_share", "in_common")
LAB_9A = "labs/09a_filling_in_blanks"
READING_RUN = ("SIZES", "MILLION", "fitted", "seeded", "MASK", "START", "END", "cut_out", "Reader")
READING_RUN += ("places_cut_out", "let_see", "in_order", "reading", "reading_losses")
READING_RUN += ("learn_to_read", "nats_cut_out")
FOUND_RUN = (*RECALL_RUN, "RATES", "WITH_POSITION", "HYBRID", "IDS", "ROW", "weights", "looks_at")
FOUND_RUN += ("seeded", "CHANGED", "with_others", "weight_on_answers", "found_by")
NEEDLE_RUN = ("FOUR", "ASKED", "DEPTHS", "VARIANTS", "answers", "digits_right", "needle_model")
NEEDLE_RUN += ("needle_loss", "learn_needles", "stretched", "heat_map")

# Let glibc keep the memory of freed tensors. Else every step asks the system for it anew, and two
# processes wait for one another there: a step of two at once took 0.45 s instead of 0.28.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**36)}
KEEP_MEMORY |= {"MALLOC_TOP_PAD_": str(2**26)}


def from_notebook(notebook, *names):
    """Take functions and constants from a notebook's source: a record shows what the reader runs.

    Raises:
        ValueError: one of the names is defined twice, or not at all.
    """
    tree = ast.parse((ROOT / "notebooks" / f"{notebook}.py").read_text())
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    wanted = [node for node in tree.body if names_of(node) & set(names)]
    if len({name for node in wanted for name in names_of(node)}) < len(wanted):
        raise ValueError(f"{notebook} defines one of {', '.join(names)} twice")
    namespace = {}
    torch.set_default_dtype(torch.float64)  # as the notebooks do
    exec(compile(ast.Module([*imports, *wanted], []), notebook, "exec"), namespace)
    if missing := [name for name in names if name not in namespace]:
        raise ValueError(f"{notebook} does not define {', '.join(missing)}")
    return [namespace[name] for name in names]


def names_of(node):
    """What a statement at the top of a notebook defines."""
    if isinstance(node, ast.Assign):
        targets = (part for target in node.targets for part in ast.walk(target))
        return {part.id for part in targets if isinstance(part, ast.Name)}
    return {getattr(node, "name", None)}


def resumed(name, jobs, run, folder=ROOT / "runs" / "records"):
    """The results of all jobs, in their order, each from a process with one thread.

    Each result is kept in runs/records/NAME.jsonl as soon as it is there, and found there after a
    stop. A line that was not finished is run again.
    """
    path = folder / f"{name}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lines = [line for line in lines if line.endswith("\n")]
    path.write_text("".join(lines))
    done = {json.dumps(job): result for job, result in map(json.loads, lines)}
    missing = [job for job in jobs if json.dumps(job) not in done]
    print(f"{name}: {len(jobs) - len(missing)} of {len(jobs)} runs are there", flush=True)
    workers = dict(initializer=torch.set_num_threads, initargs=(1,))
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), **workers) as pool:
        running = {pool.submit(run, job): job for job in missing}
        for future in concurrent.futures.as_completed(running):
            job = running[future]
            done[json.dumps(job)] = future.result()
            with path.open("a") as file:
                file.write(json.dumps([job, future.result()]) + "\n")
            print(f"{name}: {json.dumps(job)}", flush=True)
    return [done[json.dumps(job)] for job in jobs]


def jobs_and_results(name, run, jobs):
    """Every job together with what came of it."""
    return [job | found for job, found in zip(jobs, resumed(name, jobs, run), strict=True)]


def sitting():
    """minimal's Cheems and two models without its mixture, trained as that file trains its own."""
    jobs = [dict(pattern=pattern) for pattern in ("SESEIE", "SESESE", "IEIEIE")]
    return {"seed": 0, "steps": 300, "runs": jobs_and_results("00_sitting", sitting_run, jobs)}


def sitting_run(job):
    """One training run: losses, a sample, and nats per byte by place, each part of I on and off.

    Held-out windows are read as they are, and with their first half in place of the second.
    """
    torch.manual_seed(0)
    ids = text.text_to_ids(text.read_text())
    seen, held_out = ids.tensor_split([len(ids) * 9 // 10])
    model = minimal.Cheems(job["pattern"])
    losses = list(minimal.train(model, seen, 300))
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
    *_, learn = from_notebook(CHAPTER_0, *REPEAT_RUN)
    return {"right": [round(right, 3) for right in learn(**job)]}


def selective_copy():
    """Selective copying: accuracy against training steps, for five kinds of models."""
    names = ("copying_texts", "Copier", "copied", "train_to_copy")
    *_, train = from_notebook("01_state_space_models", *names)
    models = {
        "selective": dict(selective=True),
        "selective, no convolution": dict(selective=True, d_conv=1),
        "time-invariant, two layers": dict(selective=False, layers=2),
        "time-invariant": dict(selective=False),
        "time-invariant, no convolution": dict(selective=False, d_conv=1),
    }
    steps, seeds, right, ends = 600, range(5), {}, {}
    for name, options in models.items():
        runs = [train(steps=steps, seed=seed, every=25, **options) for seed in seeds]
        at_steps = list(zip(*(curve for _, curve, _ in runs), strict=True))
        places = {"median": 2, "low": 1, "high": 3}  # of the five
        right[name] = {k: [round(sorted(at)[i], 3) for at in at_steps] for k, i in places.items()}
        ends[name] = [round(end, 3) for end in at_steps[-1]]
    return {
        "seed": list(seeds),
        "steps": list(range(25, steps + 1, 25)),
        "right": right,
        "at the end": ends,
    }


def learned():
    """Accuracy on keys that were written several times, after training, against their number."""
    names = ("notes", "NoteReader", "accuracy_on_notes", "train_on_notes")
    *_, train = from_notebook("labs/02a_five_memories", *names)
    steps, seeds, counts = 300, (0, 1, 2), (4, 8, 12, 16, 20, 24, 32, 40)
    accuracy, guess = {}, []
    for name in linear_attention.RULES:
        runs = [[train(name, keys, steps, seed) for seed in seeds] for keys in counts]
        accuracy[name] = [round(statistics.median(right for right, _ in run), 3) for run in runs]
        guess = [round(statistics.median(best for _, best in run), 3) for run in runs]
    return {
        "seed": list(seeds),
        "steps": steps,
        "keys": list(counts),
        "accuracy": accuracy,
        "best guess": guess,
    }


def error_budget():
    """Errors of four float32 computations of SSD, relative to float64, against length."""
    names = ("carry_in_turn", "in_chunks", "four_steps")
    *_, four_steps = from_notebook("03_state_space_duality", *names)
    torch.set_default_dtype(torch.float32)

    def float32_total(x, *others):  # the chapter's own form keeps its total in the inputs' dtype
        return four_steps(x, *others, l_c=min(64, x.shape[1]))

    lengths = [2**i for i in range(4, 12)]
    forms = {
        "recurrence": ssd.ssd_recurrent,
        "chunked": ssd.ssd_chunked,
        "mamba-ssm's kernel": ssd.ssd_kernel,
        "chunked, total in float32": float32_total,
    }
    errors = {}
    for step in (0.05, 0.0005):
        memory = round(1 / (step * math.sqrt(2 / math.pi)))  # of the head with A = -1
        errors[str(memory)] = {name: [] for name in forms}
        for length in lengths:
            drawn = {name: [] for name in forms}
            for seed in range(5):
                generator = torch.Generator().manual_seed(seed)
                x, B, C = (torch.randn(1, length, h, 16, generator=generator) for h in (2, 1, 1))
                dt = step * torch.randn(1, length, 2, generator=generator).abs()
                tensors = (x, dt, torch.tensor([-1.0, -8.0]), B, C)
                truth = ssd.ssd_recurrent(*(t.double() for t in tensors))
                for name, form in forms.items():
                    error = (form(*tensors).double() - truth).abs().max() / truth.abs().max()
                    drawn[name].append(error.item())
            for name, values in drawn.items():
                errors[str(memory)][name].append(float(f"{statistics.median(values):.2e}"))
    return {
        "seed": list(range(5)),
        "kernel": kernels.kernel_status().mode,
        "lengths": lengths,
        "errors": errors,
    }


def shift_error():
    """How much moving all positions changes rotary SSD, with angles of three precisions."""
    length, n = 32, 64
    generator = torch.Generator().manual_seed(0)
    double = dict(generator=generator, dtype=torch.float64)
    x, B, C = (torch.randn(1, length, *size, **double) for size in ((2, 8), (1, n), (1, n)))
    dt = 0.1 * torch.randn(1, length, 2, **double).abs()
    A = -torch.tensor([1.0, 8.0], dtype=torch.float64)

    def output(shift, dtype):
        positions = (shift + torch.arange(length))[None]
        if dtype == torch.bfloat16:  # which rope_cos_sin refuses to do
            angles = positions[..., None].to(dtype) * rope.rope_frequencies(n).to(dtype)
            angles = torch.cat([angles, angles], dim=-1).double()
            cos, sin = angles.cos(), angles.sin()
        else:
            cos, sin = (t.double() for t in rope.rope_cos_sin(positions, n, dtype=dtype))
        return ssd.ssd_recurrent(
            x, dt, A, rope.apply_rope(B, cos, sin), rope.apply_rope(C, cos, sin)
        )

    shifts = [4**i for i in range(11)]
    errors = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        start = output(0, dtype)
        moved = [(output(shift, dtype) - start).abs().max() for shift in shifts]
        name = f"angles in {str(dtype).removeprefix('torch.')}"
        errors[name] = [float(f"{(m / start.abs().max()).item():.2e}") for m in moved]
    return {"seed": 0, "shifts": shifts, "errors": errors}


def three_sources():
    """Accuracy of naming the token `lag` tokens ago, for three sources of position."""
    *_, train = from_notebook("04_rotary_positions", *LOOK_BACK)
    lags, seeds, steps = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24), (0, 1, 2), 300
    positions = ("rope", "conv", "decay")
    accuracy = {position: [] for position in positions}
    for position in positions:
        for lag in lags:
            runs = [train(position, lag, steps, seed) for seed in seeds]
            accuracy[position].append(round(statistics.median(run[0] for run in runs), 3))
    return {
        "seed": list(seeds),
        "steps": steps,
        "lags": lags,
        "accuracy": accuracy,
    }


def masks():
    """What dynamic masks hide after training: gates by place."""
    names = ("decoy_memory", "GateAsPrinted", "decoy_layer", "Memory", "train_on_decoys")
    *_, train_on_decoys = from_notebook(CHAPTER_5, *names)
    seeds, gates, decoys = range(5), {}, {}
    for kind in ("none", "printed", "gate", "rounded"):
        runs = [train_on_decoys(kind, 200, seed) for seed in seeds]
        _, right, loss = zip(*runs, strict=True)
        decoys[kind] = {"right": rounded([right])[0], "loss": [round(x, 4) for x in loss]}
        mask = runs[0][0].mask
        if kind != "none":
            gates[kind] = mask.gate if kind == "printed" else mask.logit.sigmoid()
    later = {"steps": 2000}
    for kind in ("gate", "rounded"):
        layer, _, loss = train_on_decoys(kind, later["steps"])
        decoy = layer.mask.logit.sigmoid()[:, 1:16:2]
        later[kind] = {
            "loss": float(f"{loss:.2g}"),
            "decoys": rounded([[decoy.min().item(), decoy.max().item()]])[0],
            "open, per head": (decoy >= 0.5).sum(1).tolist(),
        }
    return {
        "seed": list(seeds),
        "decoys": decoys,
        "gates": {name: rounded(t.tolist()) for name, t in gates.items()},
        "later": later,
    }


def fires():
    """Which experts a trained byte model asks for which character."""
    names = ("byte_model", "train_on_bytes", "fires_for")
    _, train, fires_for = from_notebook(LAB_6A, *names)
    _, model = train(1500)
    characters = " etaoinshrdlu0123456789.,:()"
    share = fires_for(model, characters)
    most = share.sum(0).argsort(descending=True)[:60]
    rows = torch.arange(len(characters), dtype=share.dtype)
    place = (rows[:, None] * share[:, most]).sum(0) / share[:, most].sum(0)
    most = most[place.argsort()]  # experts of the first characters first
    names = ["space" if c == " " else c for c in characters]
    return {"seed": 0, "characters": names, "share": rounded(share[:, most].tolist())}


def rows():
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


def orders():
    """How patterns of two and three layers learn to recall, over five seeds."""
    learn = from_notebook(CHAPTER_7, *RECALL)[-1]
    right = {
        position: {
            pattern: rounded(learn(pattern, 400, position, seed)[1] for seed in range(5))
            for pattern in ("SA", "AS", "AA", "SS", "SAS")
        }
        for position in ("conv", "rope")
    }
    return {"seed": list(range(5)), "right": right}


def manual():
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


def recall():
    """Multi-query recall: right at each length over time, by system, width and position."""
    lengths, systems, rates, with_position = from_notebook(CHAPTER_8, *RECALL_GRID)
    seeds = range(3)
    return recall_runs(
        "08_recall",
        seeds,
        positions=[
            recall_job(name, options, 64, seed, 2000, rates[64], lengths[:2])
            for seed in seeds
            for name, options in with_position.items()
        ],
        grid=[
            recall_job(name, options, d, seed, 3000, rate, lengths)
            for d, rate in rates.items()
            for seed in seeds
            for name, options in systems.items()
        ],
    )


def recall_rates():
    """Multi-query recall, small: four rates, longer runs, and the live ones of five seeds."""
    lengths, systems, rates, with_position = from_notebook(CHAPTER_8, *RECALL_GRID)
    seeds = range(3)
    return recall_runs(
        "08_rates",
        seeds,
        longer=[recall_job("SSD", systems["SSD"], 64, 0, 20_000, rates[64], lengths[:2])],
        rates=[
            recall_job(name, systems[name], 32, seed, 2000, rates[32] * factor, lengths[:2])
            for factor in (1, 1 / 3, 3, 1 / 10)
            for seed in seeds
            for name in ("SSD", "QCAttn")
        ],
        live=[
            recall_job(name, (systems | with_position)[name], 32, seed, 200, rates[32], (32,))
            for seed in range(5)
            for name in ("SSD, attention, convolution", "QCAttn")
        ],
        alone=[
            recall_job("QCAttn", systems["QCAttn"], 64, seed, 3000, rates[64], lengths[-1:])
            for seed in seeds
        ],
        slower=[
            recall_job("SSD", systems["SSD"], 32, seed, 6000, rates[32] / 3, lengths[:2])
            for seed in seeds
        ],
    )


def recall_job(system, options, d, seed, steps, rate, lengths):
    told = dict(system=system, d=d, seed=seed, steps=steps, rate=rate, lengths=list(lengths))
    return dict(**told, options=options)


def recall_runs(name, seeds, **parts):
    runs = iter(resumed(name, [job for jobs in parts.values() for job in jobs], recall_run))
    record = {
        part: [{k: v for k, v in job.items() if k != "options"} | next(runs) for job in jobs]
        for part, jobs in parts.items()
    }
    minutes = sum(run["minutes"] for runs in record.values() for run in runs)
    return {"seed": list(seeds), "core hours": round(minutes / 60, 1), **record}


def recall_run(job):
    """One training run of chapter 08: minutes, and the share right at each length over time."""
    *_, learn = from_notebook(CHAPTER_8, *RECALL_RUN)
    start = time.perf_counter()
    size = {name: job[name] for name in ("d", "steps", "rate", "seed", "lengths")}
    _, right = learn(**size, **job["options"])
    return {"minutes": round((time.perf_counter() - start) / 60, 2), "right": rounded(right)}


def found():
    """What attention looks at in chapter 08's trained hybrid, and once its keys are others."""
    parts = dict(zip(FOUND_RUN, from_notebook(CHAPTER_8, *FOUND_RUN), strict=True))
    options = parts["WITH_POSITION"][parts["HYBRID"]]
    model, _ = parts["learn_to_recall"](32, 200, parts["RATES"][32], 0, (32,), **options)
    result = parts["found_by"](model.requires_grad_(False))
    maps = {name: rounded(rows) for name, rows in result.pop("maps").items()}
    return {"seed": 0, **result, "maps": maps}


def needles():
    """The needle: four systems, short and long texts, each at the best of three rates."""
    four, windows = from_notebook(LAB_8A, "FOUR", "WINDOWS")
    rates, seeds, steps = (1e-3, 3e-3, 3e-4), range(3), 2500

    def job(system, kind, seed, rate, with_text=False):
        told = dict(system=system, kind=kind, windows=list(windows[kind]), seed=seed, rate=rate)
        return dict(**told, steps=steps if not with_text else 1000, with_text=with_text)

    def order(one):
        """The share right at the longest texts, in tenths; then the fewer updates."""
        return -(one["right"][-1][-1] // 0.1), len(one["right"])

    run = functools.partial(jobs_and_results, "08_needle", needle_run)
    tried = run([job(system, "short", 0, rate) for rate in rates for system in four])
    best = {
        system: min((one for one in tried if one["system"] == system), key=order)["rate"]
        for system in four
    }
    grid = run([job(s, kind, seed, best[s]) for kind in windows for seed in seeds for s in four])
    beside = run([job(system, "short", 0, best[system], with_text=True) for system in four])
    others = [one for one in tried if one["rate"] != best[one["system"]]]  # not in the grid
    minutes = sum(one["minutes"] for one in others + grid + beside)
    parts = {"best": best, "rates": tried, "grid": grid, "with text": beside}
    return {"seed": list(seeds), "core hours": round(minutes / 60, 1), **parts}


def needle_run(job):
    """One training run of lab 08a: the share right over time, and heat maps."""
    parts = dict(zip(NEEDLE_RUN, from_notebook(LAB_8A, *NEEDLE_RUN), strict=True))
    start, window = time.perf_counter(), job["windows"][-1]
    how = {name: job[name] for name in ("windows", "steps", "rate", "seed", "with_text")}
    model, right = parts["learn_needles"](job["system"], **how)
    result = {"right": rounded(right)}
    if not job["with_text"]:
        haystack = training.split_text(text.text_to_ids(text.read_text()), 0.1)[1]
        remedies = parts["VARIANTS"]
        if job["system"] == "Mamba-2":  # nothing in it is rotated, and it has no queries
            remedies = {"as trained": {}}
        heat = {k: parts["heat_map"](model, window, haystack, **v) for k, v in remedies.items()}
        result["heat"] = {name: rounded(rows) for name, rows in heat.items()}
    return {"minutes": round((time.perf_counter() - start) / 60, 2), **result}


def ablation_inner():
    """Three inner functions in a hybrid of a million parameters, six seeds."""
    (rows,) = from_notebook(CHAPTER_9, "INNER")
    return ablation("09_inner", rows, range(1, 7))


def ablation_position():
    """Where state layers and attention take positions from, three seeds."""
    (rows,) = from_notebook(CHAPTER_9, "position_rows")
    return ablation("09_position", rows(), range(1, 4), 200)


def ablation_longer():
    """Convolution against rotation once more, in three times as many updates, three seeds."""
    (rows,) = from_notebook(CHAPTER_9, "position_rows")
    two = {f"S + A, {source}": rows()[f"S + A, {source}"] for source in ("conv", "rope")}
    return ablation("09_longer", two, range(3), 600, rates=(3e-3,))


def ablation_orders():
    """Jamba's order, OTCE's, and one with as much attention, six seeds; and chapter 07's recall."""
    rows, recalling = from_notebook(CHAPTER_9, "ORDERS", "RECALLING")
    record = ablation("09_orders", rows, range(1, 7), 200)
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
    *_, learn = from_notebook(CHAPTER_7, *RECALL)
    start = time.perf_counter()
    _, right = learn(job["pattern"], job["steps"], "conv", job["seed"])
    minutes = round((time.perf_counter() - start) / 60, 2)
    return {"minutes": minutes, "right": [round(share, 3) for share in right]}


def ablation_experts():
    """MLP and CDMoE in the six patterns of WM's Table 2, three seeds."""
    (rows,) = from_notebook(CHAPTER_9, "EXPERTS")
    return ablation("09_experts", rows, range(1, 4), 200)


def ablation_routed():
    """DGLU and routed MoE in the seventeen patterns of OTCE's Table 5, smaller, three seeds."""
    (rows,) = from_notebook(CHAPTER_9, "ROUTED")
    return ablation("09_routed", rows, range(3), 100, rates=(3e-3,))


def ablation_shared():
    """What experts share, seven kinds and none, three seeds."""
    (rows,) = from_notebook(CHAPTER_9, "SHARED")
    return ablation("09_shared", rows, range(1, 4), 200)


def ablation_gated():
    """Experts, MLP and DGLU once more, on seeds that no table has seen."""
    (shared,) = from_notebook(CHAPTER_9, "SHARED")
    rows = {row: shared[row] for row in controls.GATED}
    how = dict(rates=(1e-3, 3e-3, 1e-2, 3e-2), tuning=(0, 9))
    record = ablation("09_gated", rows, range(11, 16), 200, **how)
    return {"prediction": " ".join(controls.GATED_PREDICTION.split()), **record}


def ablation_systems():
    """The papers' systems, whole, and two of them with the other's source of position."""
    (rows,) = from_notebook(CHAPTER_9, "SYSTEMS")
    record = ablation("09_systems", rows, range(1, 6), 200, tuning=(0, 6))
    return {"prediction": " ".join(controls.SYSTEMS_PREDICTION.split()), **record}


def ablation_systems_longer():
    """Three whole systems for five times as many updates, at the rates of the shorter runs."""
    (systems,) = from_notebook(CHAPTER_9, "SYSTEMS")
    rows = {row: systems[row] for row in controls.LONGER}
    record = ablation("09_systems_longer", rows, range(1, 4), 1000, rates=(3e-3,))
    return {"prediction": " ".join(controls.LONGER_PREDICTION.split()), **record}


def ablation_reading():
    """Texts in order and texts with blanks, in three patterns, three seeds."""
    objectives, patterns = from_notebook(LAB_9A, "OBJECTIVES", "PATTERNS")
    rows = {
        f"{name}, {objective}": dict(pattern=patterns[name], objective=objective)
        for name, several in objectives.items()
        for objective in several
    }
    return ablation("09_reading", rows, range(1, 4), 200, reading_run)


def ablation(name, rows, seeds, steps=300, run_one=None, rates=None, tuning=(0,)):
    """Every row at the best of several rates, tried with the tuning seeds, or at a given one."""
    (rates,) = from_notebook(CHAPTER_9, "RATES") if rates is None else (rates,)
    settings = ablation_settings(steps)
    size = dict(steps=settings.steps, batch_size=settings.batch_size, seq_len=settings.seq_len)
    run = functools.partial(jobs_and_results, name, run_one or ablation_run)

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
    training, by_steps = from_notebook(CHAPTER_9, "TRAINING", "BY_STEPS")
    return by_steps.get(steps, training)


@functools.cache
def ablation_corpus():
    return text.read_corpus(eval_fraction=ablation_settings(300).eval_fraction)


def ablation_run(job):
    """One training run of chapter 09: minutes, parameters, and held-out nats over time."""
    parts = dict(zip(ABLATION_RUN, from_notebook(CHAPTER_9, *ABLATION_RUN), strict=True))
    corpus, start, models = ablation_corpus(), time.perf_counter(), []
    settings = ablation_settings(job["steps"])
    torch.set_default_dtype(torch.float32)
    settings = dataclasses.replace(settings, eval_fraction=corpus.eval_fraction)
    fields = dict(job["fields"])
    turned = fields.pop("turned", True)
    config = parts["fitted"](**fields)

    def at_start(name, run):
        models.append(run.model)
        if not turned:
            parts["unturned"](run.model)

    how = (job["rate"], job["seed"], settings, corpus.ids, at_start)
    nats = parts["one_run"](job["row"], config, *how)
    result = {
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "parameters": parts["parameters"](config),
        "d_ff": config.d_ff,
        "nats": [[step, round(loss, 5)] for step, loss in nats],
    }
    if set(config.pattern) & set("RHCX"):
        held_out = training.split_text(corpus.ids, corpus.eval_fraction)[1]
        shares = parts["in_common"](models[0], held_out[: 4 * 512].view(4, 512).long())
        result["in common"] = [round(share, 4) for share in shares]
    return result


def reading_run(job):
    """One training run of lab 09a: minutes, and held-out nats of what is cut out."""
    parts = dict(zip(READING_RUN, from_notebook(LAB_9A, *READING_RUN), strict=True))
    corpus, start = ablation_corpus(), time.perf_counter()
    settings = ablation_settings(job["steps"])
    settings = dataclasses.replace(settings, learning_rate=job["rate"], seed=job["seed"])
    torch.set_default_dtype(torch.float32)
    ids, held_out = training.split_text(corpus.ids.long(), corpus.eval_fraction)
    objective = job["fields"]["objective"]
    reader = parts["learn_to_read"](job["fields"]["pattern"], objective, settings, ids)
    nats, places = parts["nats_cut_out"](reader, objective, held_out)
    return {
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "parameters": sum(parameter.numel() for parameter in reader.parameters()),
        "d_ff": reader.model.config.d_ff,
        "nats": [[settings.steps, round(nats.mean().item(), 5)]],
        "by place": [round(nats[places == place].mean().item(), 5) for place in range(1, 7)],
    }


def books_controlled():
    """Whether computing in the values buys what one more layer would."""
    books = functools.partial(taken, controls.book_run, CHAPTER_5, ("account_books",))
    return controls.inner_or_layer(functools.partial(resumed, "05_one_more_layer", run=books))


def recall_controlled():
    """Whether a state learns recall, or a look at the neighbour."""
    run = functools.partial(resumed, "07_state_or_neighbour", run=recall_control)
    return controls.state_or_neighbour(run)


def recall_control(job):
    *_, learn = from_notebook(CHAPTER_7, *RECALL)
    return controls.recall_run(job, learn)


def recall_rows():
    """The rows of chapter 08's section 5, each at its best rate."""
    *_, with_position = from_notebook(CHAPTER_8, *RECALL_GRID)
    run = functools.partial(learned_recall, CHAPTER_8, RECALL_RUN)
    all_runs = functools.partial(resumed, "08_rows", run=run)
    return controls.rows_at_their_rates(all_runs, with_position)


def learned_recall(notebook, names, job):
    *_, learn = from_notebook(notebook, *names)
    return controls.order_run(job, learn)


def kinship():
    """What experts share under a trained router."""
    names = "byte_model", "train_on_bytes", "fires_for"
    run = functools.partial(taken, controls.kinship_run, LAB_6A, names)
    return controls.kin(functools.partial(resumed, "06_kinship", run=run))


def two_processes(turns=11):
    """A text on one process, then half of it on each of two: times of forward and backward."""
    wall, work = {}, {}
    for pattern, length in itertools.product("SA", (512, 2048, 4096)):
        with tempfile.TemporaryDirectory() as folder:
            jobs = [(rank, f"{folder}/meeting", pattern, length, turns) for rank in (0, 1)]
            with concurrent.futures.ProcessPoolExecutor(2) as pool:
                found = [job.result() for job in [pool.submit(timed_on, *job) for job in jobs]]
        most = [
            [max(times) for times in zip(*turn, strict=True)] for turn in zip(*found, strict=True)
        ]
        for of_kind, seconds in zip((wall, work), zip(*most, strict=True), strict=True):
            of_kind.setdefault(pattern, {})[length] = [round(x, 5) for x in seconds]
    return {"turns": turns, "cores": os.cpu_count(), "wall": wall, "busiest rank": work}


def timed_on(rank, meeting, pattern, length, turns):
    """What chapter 12 measures on one of two ranks; the first turns of both kinds are left out."""
    (timed,) = from_notebook("12_scaling_out", "timed")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=rank, world_size=2)
    return timed(rank, pattern, length, turns + 1)[2:]


def taken(run, notebook, names, job):
    """Run a job with the functions of a notebook."""
    return run(job, *from_notebook(notebook, *names))


def rounded(rows):
    return [[round(entry, 3) for entry in row] for row in rows]


WRITERS = {
    "00_repeat": repeats,
    "00_sitting": sitting,
    "01_selective_copy": selective_copy,
    "02_learned": learned,
    "03_error_budget": error_budget,
    "04_shift_error": shift_error,
    "04_three_sources": three_sources,
    "05_masks": masks,
    "05_one_more_layer": books_controlled,
    "06_fires": fires,
    "06_kinship": kinship,
    "06_rows": rows,
    "07_orders": orders,
    "07_state_or_neighbour": recall_controlled,
    "07_training": manual,
    "08_recall": recall,
    "08_rows": recall_rows,
    "08_rates": recall_rates,
    "08_found": found,
    "08_needle": needles,
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
    "12_two_processes": two_processes,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="+", choices=WRITERS, metavar="NAME", help=", ".join(WRITERS)
    )
    names = parser.parse_args().names
    if not KEEP_MEMORY.items() <= os.environ.items():  # which glibc reads when a program starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    for name in names:
        torch.set_default_dtype(torch.float32)  # a record before this one may have changed it
        record = {
            "command": f"python book/records.py {name}",
            "machine": platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "date": datetime.date.today().isoformat(),
            **WRITERS[name](),
        }
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / f"{name}.json").write_text(json.dumps(record) + "\n")
        print(f"figures/records/{name}.json")


if __name__ == "__main__":
    main()
