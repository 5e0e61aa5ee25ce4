"""The interactive pages: copied from book/site/play, each with its data as a plain script.

    python -m book.site.interactive_pages FOLDER
    python -m book.site.interactive_pages --cheems RUN

A page is NAME.html with NAME.js. The function NAME here returns its data, which `make` writes as
NAME_data.js: `const DATA = {...}`. The pages open from the folder and from a server, and ask for
nothing elsewhere. Functions import `cheems_ref` themselves, since torch takes seconds to import.
The second command replaces the model of the page "A Cheems in the page" by that of a training run.
"""

import base64
import dataclasses
import json
import math
import operator
import platform
import random
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, get_args

from book.project import ROOT


class Page(NamedTuple):
    """An interactive page: its data, its title, its chapter, and the figure without scripts."""

    data: Callable[[], dict | None]
    title: str
    chapter: str
    figure: str

    @property
    def name(self) -> str:
        return self.data.__name__


def matrix() -> dict:
    """Twelve tokens: A, steps, and B and C with up to three columns, of which the first is 1."""
    draw = random.Random(3)
    B, C = ([[1, *(round(draw.random(), 2) for _ in "12")] for _ in range(12)] for _ in "BC")
    steps = [draw.randrange(20, 85, 5) / 100 for _ in range(12)]
    return dict(A=-0.5, dt=steps, B=B, C=C)


NAMES = [
    "ann",
    "bob",
    "cyd",
    "dan",
    "eve",
    "fay",
    "gus",
    "hal",
    "ivy",
    "jon",
    "kim",
    "lea",
    "max",
    "ned",
    "ola",
    "pia",
]


def memory(seed: int = 756) -> dict:
    """Names with a number each, and their keys: unit vectors, random ones and orthogonal ones.

    Only n keys are orthogonal to each other, so later names have those of the first again. The seed
    is one whose keys are neither lucky nor unlucky: the first wrong answer comes when it does in
    most draws, and after all cards linear attention answers about as many names as on average.
    """
    draw = random.Random(seed)
    digits = [3, 8, *(draw.randrange(10) for _ in NAMES[2:])]
    keys = {"random": {}, "orthogonal": {}}
    for n in (4, 8, 16):
        keys["random"][n] = [unit([draw.gauss(0, 1) for _ in range(n)]) for _ in NAMES]
        rows = []
        while len(rows) < n:
            row = [draw.gauss(0, 1) for _ in range(n)]
            for other in rows * 2:  # twice, for the rounding of the first time
                along = sum(map(operator.mul, row, other))
                row = [x - along * y for x, y in zip(row, other, strict=True)]
            rows.append(unit(row))
        keys["orthogonal"][n] = [rows[i % n] for i in range(len(NAMES))]
    cards = [dict(name=name, digit=digit) for name, digit in zip(NAMES, digits, strict=True)]
    return dict(names=NAMES, cards=cards, keys=keys)


def unit(vector: list[float]) -> list[float]:
    size = math.hypot(*vector)
    return [x / size for x in vector]


def pattern() -> dict:
    """Letters, presets, and the fields of a config that its numbers depend on."""
    from cheems_ref import attention, config, presets, ssd

    kinds = {int: "size", int | None: "optional", bool: "flag"}
    kinds |= {words: get_args(words) for words in (ssd.Position, attention.Inner)}
    kinds |= {attention.Mask | None: [None, *get_args(attention.Mask)]}
    fields, defaults = {}, {}
    for field in dataclasses.fields(config.ModelConfig):
        if field.type in kinds and field.name not in ("chunk_size", "k_keys"):
            fields[field.name] = dict(kind=kinds[field.type], **field.metadata)
            defaults[field.name] = field.default
    letters = {
        key: dict(name=layer.name, fields=[*layer.fields.values()])
        for key, layer in config.LAYERS.items()
    }
    limits = dict(mixers=config.SEQUENCE_MIXERS, max_layers=config.MAX_LAYERS)
    presets = presets.PRESETS
    return dict(letters=letters, fields=fields, defaults=defaults, presets=presets, **limits)


def cheems() -> None:
    """Nothing: its data, cheems_weights.js, took minutes of training. `write_cheems` made it."""


# What cheems.js takes for granted; the sizes are free.
CHEEMS = dict(vocab_size=256, n_kv_heads=None, d_head=None, n_groups=1, position="rope")
CHEEMS |= dict(inner="retrieved", mask="content", k_keys=None, tie_embeddings=True)


def write_cheems(run: Path, file: Path) -> None:
    """Write the newest checkpoint of a run as the page's model: weights in float16, and a record.

    Raises:
        SystemExit: cheems.js can't compute such a model, or the text of the run has changed.
    """
    from cheems_lab.checkpoint import load_model, newest_checkpoint, read_record
    from cheems_ref.config import from_saved
    from cheems_ref.text import fingerprint, read_text, text_to_ids
    from cheems_ref.train import TrainConfig, evaluate, split_text

    checkpoint = read_record(newest_checkpoint(run))
    config = from_saved(checkpoint["model"])
    training = TrainConfig(**checkpoint["training"])
    other = {name: v for name, v in vars(config).items() if CHEEMS.get(name, v) != v}
    if other or set(config.pattern) - set("SIE"):
        raise SystemExit(f"cheems.js has no code for {config.pattern} with {other}")
    source = checkpoint["options"].get("text")
    ids = text_to_ids(read_text(source))
    if fingerprint(ids) != checkpoint["text"]:
        raise SystemExit(f"{source or 'the manual'} has changed since {run} was trained on it")
    model = load_model(run).half().float()  # rounded, as the page has it
    seen, held_out = split_text(ids, training.eval_fraction)
    record = dict(
        text=source or "Python's manual",
        command=train_command(source, config, training),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        held_out=round(evaluate(model, held_out, seq_len=training.seq_len), 4),
        bigram=round(bigram(seen, held_out), 4),
        versions=dict(python=platform.python_version(), torch=version("torch")),
    )
    script = f'const CHEEMS = {{\n"record": {json.dumps(record)},\n'
    script += f'"config": {json.dumps(vars(config))},\n"weights": {{\n'
    for name, tensor in model.named_parameters():
        numbers = base64.b64encode(tensor.detach().numpy().astype("<f2").tobytes()).decode()
        script += f'"{name}": {json.dumps(dict(shape=[*tensor.shape], float16=numbers))},\n'
    script = script.removesuffix(",\n") + "\n}\n};\n"
    file.write_text(script, encoding="utf-8", newline="\n")


def train_command(source, config, training) -> str:
    """The `cheems train` of such a run: its seed, and the options that differ from the defaults."""
    from cheems_lab.console import shell_command

    words = ["--text", source] * bool(source) + ["--run", "RUN", "--pattern", config.pattern]
    for name, usual in vars(type(config)(config.pattern)).items():
        value = getattr(config, name)
        words += ["--set", f"{name}={value}"] * (value != usual)
    for name, usual in vars(type(training)()).items():
        value = getattr(training, name)
        words += [f"--{name.replace('_', '-')}", value] * (value != usual or name == "seed")
    return shell_command("train", *words)


def bigram(seen, held_out) -> float:
    """The held-out loss of counting which byte follows which, as in chapter 07, section 8."""
    import torch

    ones, counts = torch.ones(len(seen) - 1), torch.full((256, 256), 0.1)
    counts.index_put_((seen[:-1], seen[1:]), ones, accumulate=True)
    shares = counts / counts.sum(dim=1, keepdim=True)
    return -shares[held_out[:-1], held_out[1:]].log().mean().item()


PAGES = [
    Page(memory, "One memory, five rules", "02_linear_attention", "02_write.svg"),
    Page(matrix, "The matrix", "03_state_space_duality", "03_duality.svg"),
    Page(pattern, "The pattern", "07_cheems_language_model", "07_stack.svg"),
    Page(cheems, "A Cheems in the page", "07_cheems_language_model", "07_stack.svg"),
]


def links(folder: str, chapter: str | None = None) -> str:
    """Links to the pages of a chapter, or to all: "" where there are none."""
    shown = [page for page in PAGES if chapter in (None, page.chapter)]
    each = " · ".join(f'<a href="{folder}play/{p.name}.html">{p.title}</a>' for p in shown)
    return each and f"\n\nTry it in the browser: {each}.\n"


def others(page: Page) -> str:
    """What the head of a page has beside its chapter: links to the other pages, and the theme."""
    shown = [f'· <a href="{p.name}.html">{p.title}</a>' for p in PAGES if p is not page]
    switch = '<button id="theme" type="button"></button>\n<script src="theme.js"></script>'
    return "\n".join(["", *shown, switch])


def make(root: Path, folder: Path) -> None:
    """Write the pages, their data and their figures into a new folder."""
    shutil.copytree(root / "book" / "site" / "play", folder)
    shutil.copy(root / "book" / "site" / "static" / "favicon.svg", folder)
    for page in PAGES:
        path = folder / f"{page.name}.html"
        text = path.read_text(encoding="utf-8").replace("<!-- pages -->", others(page), 1)
        path.write_text(text, encoding="utf-8", newline="\n")
    for page in PAGES:
        if (data := page.data()) is not None:
            script = f"const DATA = {json.dumps(data, ensure_ascii=False)};\n"
            (folder / f"{page.name}_data.js").write_text(script, encoding="utf-8", newline="\n")
        if (root / "figures" / page.figure).exists():
            shutil.copy(root / "figures" / page.figure, folder)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--cheems":
        write_cheems(Path(arguments[1]), ROOT / "book" / "site" / "play" / "cheems_weights.js")
    else:
        make(ROOT, Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
