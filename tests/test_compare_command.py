"""The command `compare`: what it says and draws, what it refuses, how it goes on after Ctrl-C."""

import math
import os
import re

import pytest
from test_commands import TEXT, pasted, run, struck, succeeds

from cheems_lab import comparison
from cheems_lab.commands.compare import table
from cheems_lab.comparison import Evaluation, Row, compare, read_evaluations
from cheems_ref.budget import count_parameters
from cheems_ref.config import ModelConfig
from cheems_ref.text import read_corpus, text_to_ids
from cheems_ref.train import TrainConfig

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

SIZES = dict(d_model=16, d_ff=16)
SHORT = ["--steps", 4, "--batch-size", 2, "--seq-len", 16, "--evaluate-every", 2, "--device", "cpu"]
ROWS = ["--row", "one=AM,n_heads=2", "--row", "two=SM,d_state=4,learning_rate=1e-4"]


def comparing(folder, *more, rows=ROWS, name="run"):
    text = folder / "text"
    folder.mkdir(exist_ok=True)
    text.write_text(TEXT, encoding="utf-8")
    sizes = [word for key, n in SIZES.items() for word in ("--set", f"{key}={n}")]
    return ["compare", "--run", folder / name, "--text", text, *rows, *sizes, *SHORT, *more]


def losses(folder, name="run"):
    found = {}
    for e in read_evaluations(folder / name):
        found.setdefault(e.row, {}).setdefault(e.seed, []).append(e.nats)
    return found


def test_is_what_python_compares(tmp_path):
    plot = tmp_path / "plot.svg"
    done = succeeds(run(*comparing(tmp_path, "--seeds", 2, "--plot", plot)))
    assert f"drawn: {plot}" in done.out and plot.read_text().count("</svg>") == 1
    rows = {
        "one": Row(ModelConfig("AM", n_heads=2, **SIZES)),
        "two": Row(ModelConfig("SM", d_state=4, **SIZES), 1e-4),
    }
    config = TrainConfig(steps=4, batch_size=2, seq_len=16, evaluate_every=2)
    ids, directory = text_to_ids(TEXT), tmp_path / "python"
    wanted = compare(rows, ids, config, seeds=(0, 1), directory=directory)
    assert sorted(read_evaluations(tmp_path / "run")) == sorted(wanted)


def test_the_table_tells_what_was_found(tmp_path):
    done = succeeds(run(*comparing(tmp_path)))
    head, one, two = done.out.splitlines()[-3:]
    assert re.split(r"\s{2,}", head) == [
        "row", "parameters", "active", "held-out nats", "each seed", "less one"
    ]  # fmt: skip
    found = losses(tmp_path)
    for name, line in (("one", one), ("two", two)):
        cells, ends = re.split(r"\s{2,}", line), [found[name][seed][-1] for seed in range(3)]
        config = ModelConfig("AM", n_heads=2, **SIZES)
        if name == "two":
            config = ModelConfig("SM", d_state=4, **SIZES)
        n = sum(c.total for c in count_parameters(config).values())
        assert cells[:3] == [name, f"{n:,}", f"{n:,}"]
        assert cells[3].startswith(f"{sum(ends) / 3:.3f} ± ")
        assert cells[4] == " ".join(f"{end:.3f}" for end in ends)
    apart = [found["two"][seed][-1] - found["one"][seed][-1] for seed in range(3)]
    mean = sum(apart) / 3
    half = 4.303 * math.sqrt(sum((x - mean) ** 2 for x in apart) / 2 / 3)
    verdict = "a difference" if abs(mean) > half else "no difference"
    assert two.endswith(f"{mean:+.3f} ± {half:.3f}  {verdict}")


def evaluations(one, two):
    return [
        Evaluation(name, seed, 4, nats)
        for name, ends in (("one", one), ("two", two))
        for seed, nats in enumerate(ends)
    ]


def test_a_difference_is_claimed_where_the_interval_says_so():
    rows = {name: Row(ModelConfig("AM", **SIZES)) for name in ("one", "two")}
    for one, two, verdict in (
        ([1.0, 1.1, 1.2], [1.5, 1.6, 1.7], "+0.500 ± 0.000  a difference"),
        ([1.5, 1.6, 1.7], [1.0, 1.1, 1.2], "-0.500 ± 0.000  a difference"),
        ([1.0, 1.1, 1.2], [1.2, 1.1, 1.0], "+0.000 ± 0.497  no difference"),
        ([1.0, 1.0, 1.0], [1.1, 1.3, 1.0], "+0.133 ± 0.379  no difference"),
        ([1.0], [2.0], "+1.000  one seed tells nothing"),
        ([1.0, 1.1], [2.0], "+1.000  one seed tells nothing"),
    ):
        lines = table(rows, evaluations(one, two)).splitlines()
        assert lines[2].endswith(verdict), lines[2]
        assert not lines[1].endswith("difference")


def test_goes_on_and_takes_more(tmp_path):
    whole = succeeds(run(*comparing(tmp_path, "--seeds", 2))).out.splitlines()[-3:]
    again = succeeds(run(*comparing(tmp_path, "--seeds", 2))).out
    assert again.splitlines()[-3:] == whole and "seed" not in again.partition("\n")[2][:40]
    more = succeeds(run(*comparing(tmp_path, "--seeds", 2, "--row", "three=AM"))).out
    assert more.splitlines()[-4:-1][1].split()[0] == "one" and "three, seed 1" in more
    assert "one, seed" not in more


def test_a_folder_is_a_corpus(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir(parents=True)
    for i in range(30):
        (texts / f"{i}").write_text(f"{i} is the number of this text. " * 5)
    words = comparing(tmp_path, "--eval-fraction", 0.3, "--seeds", 1)
    words[words.index("--text") + 1] = texts
    kept, apart = read_corpus(texts, eval_fraction=0.3).texts
    assert f"{kept} texts to train on and {apart} held out" in succeeds(run(*words)).out


WRONG = [
    (["--row", "AM"], "--row: takes NAME=PATTERN,FIELD=VALUE,..., 'AM' is not"),
    (["--row", "one=AM"], "--row one is given twice"),
    (["--row", "a=AZ"], "--row a: unknown letter 'Z'"),
    (["--row", "a=AM,d_modle=4"], "--row: d_modle=4: no field is named 'd_modle'"),
    (["--row", "a=AM,learning_rate=-1"], "learning_rate must be"),
    (["--text", "nowhere"], "No such file or directory: 'nowhere'"),
    (["--seq-len", "5000"], "the text has"),
    (["--row", "a=AM,mask=content"], "--row a: mask has no effect on AM: it is for I"),
    (["--set", "d_conv=3"], "--set d_conv has no effect on AM, SM: it is for S with"),
]


def test_what_cannot_be_is_refused_in_one_line(tmp_path):
    for words, message in WRONG:
        done = run(*comparing(tmp_path, *words))
        assert done.status in (1, 2) and done.err.count("\n") == 1
        assert message in done.err, done.err


def test_another_model_under_the_same_name_is_refused(tmp_path):
    succeeds(run(*comparing(tmp_path, "--seeds", 1)))
    done = run(*comparing(tmp_path, "--seeds", 1, "--set", "d_ff=8"))
    assert done.status == 1 and "another model: d_ff = 16, now 8" in done.err


@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
def test_ctrl_c_saves_and_the_command_goes_on(tmp_path):
    with struck(3, where=comparison):
        done = run(*comparing(tmp_path, "--seeds", 1))
    assert done.status == 130, done.err
    assert len(list((tmp_path / "run").rglob("*.safetensors"))) == 1
    succeeds(run(*pasted(done.err, "stopped; to resume: ")))
    succeeds(run(*comparing(tmp_path, "--seeds", 1, name="whole")))
    found, wanted = ((tmp_path / name / "comparison.json").read_text() for name in ("run", "whole"))
    assert found == wanted
