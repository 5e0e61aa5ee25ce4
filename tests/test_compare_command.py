"""The command `compare`: what it says and draws, what it refuses, how it goes on after Ctrl-C."""

import contextlib
import json
import os
import re

import pytest
from test_commands import TEXT, fails, pasted, run, struck, succeeds
from training import Broken, Screen, content, names, step

from cheems_lab import comparison
from cheems_lab.__main__ import main
from cheems_lab.commands.compare import table
from cheems_lab.comparison import Evaluation, Row, compare, read_evaluations
from cheems_ref.budget import count_parameters
from cheems_ref.compare import interval
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


def test_is_what_python_compares_and_the_table_tells_it(tmp_path):
    plot = tmp_path / "plot.svg"
    *_, head, one, two, drawn = succeeds(run(*comparing(tmp_path, "--plot", plot))).out.splitlines()
    assert drawn == f"drawn: {plot}" and plot.read_text().count("</svg>") == 1
    rows = {
        "one": Row(ModelConfig("AM", n_heads=2, **SIZES)),
        "two": Row(ModelConfig("SM", d_state=4, **SIZES), 1e-4),
    }
    config = TrainConfig(steps=4, batch_size=2, seq_len=16, evaluate_every=2)
    ids, directory = text_to_ids(TEXT), tmp_path / "python"
    wanted = compare(rows, ids, config, seeds=(0, 1, 2), directory=directory)
    assert sorted(read_evaluations(tmp_path / "run")) == sorted(wanted)
    head, *lines = (re.split(r"\s{2,}", line) for line in (head, one, two))
    assert head == ["row", "parameters", "active", "held-out nats", "each seed", "minus one"]
    for (name, row), cells in zip(rows.items(), lines, strict=True):
        ends = [e.nats for e in wanted if e.row == name and e.step == 4]
        n = sum(c.total for c in count_parameters(row.config).values())
        assert cells[:3] == [name, f"{n:,}", f"{n:,}"]
        assert cells[3].startswith(f"{sum(ends) / 3:.3f} ± ")
        assert cells[4] == " ".join(f"{end:.3f}" for end in ends)


def test_as_json_it_has_the_numbers_of_the_table(tmp_path):
    """Alone on standard output; the lines of the runs are on the other."""
    done = run(*comparing(tmp_path, "--json", "--seeds", 2))
    assert done.status == 0 and "two, seed 1: held out" in done.err
    found, evaluations = json.loads(done.out), read_evaluations(tmp_path / "run")
    assert found["baseline"] == "one" and [*found["rows"]] == ["one", "two"]
    assert len(found["evaluations"]) == len(evaluations) == 8
    ends = {(e.row, e.seed): e.nats for e in evaluations if e.step == 4}
    for name, row in found["rows"].items():
        wanted = interval([ends[name, 0], ends[name, 1]])
        assert row["held_out"] == {"mean": wanted.mean, "half_width": wanted.half_width}
        assert row["by_seed"] == {"0": ends[name, 0], "1": ends[name, 1]}
    apart = interval([ends["two", seed] - ends["one", seed] for seed in (0, 1)])
    judged = found["rows"]["two"]["minus_baseline"]
    assert (
        judged["mean"] == pytest.approx(apart.mean) and "minus_baseline" not in found["rows"]["one"]
    )
    alone = json.loads(run(*comparing(tmp_path, "--json", "--seeds", 1)).out)["rows"]["two"]
    assert alone["held_out"]["half_width"] is None and alone["minus_baseline"]["p_value"] is None


def test_a_difference_is_claimed_where_the_interval_says_so():
    rows = {name: Row(ModelConfig("AM", **SIZES)) for name in ("one", "two")}
    for one, two, verdict in (
        ([1.0, 1.1, 1.2], [1.5, 1.6, 1.7], "+0.500 ± 0.000  a difference"),
        ([1.0, 1.0, 1.0], [1.1, 1.3, 1.0], "+0.133 ± 0.379  no difference shown"),
        ([1.0], [2.0], "+1.000  one seed tells nothing"),
        ([1.0, 1.1], [2.0], "+1.000  one seed tells nothing"),
    ):
        ends = [("one", *pair) for pair in enumerate(one)]
        ends += [("two", *pair) for pair in enumerate(two)]
        found = [Evaluation(name, seed, 4, nats) for name, seed, nats in ends]
        lines = table(rows, found).splitlines()
        assert lines[2].endswith(verdict), lines[2]
        assert "difference" not in lines[1]


def test_a_folder_is_a_corpus(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir(parents=True)
    for i in range(30):
        (texts / f"{i}").write_text(f"{i} is the number of this text. " * 5)
    words = comparing(tmp_path, "--eval-fraction", 0.3, "--seeds", 1)
    words[words.index("--text") + 1] = texts
    kept, apart = read_corpus(texts, eval_fraction=0.3).texts
    assert f"{kept} texts to train on and {apart} held out" in succeeds(run(*words)).out


def test_what_cannot_be_is_refused_in_one_line(tmp_path):
    for words, message, status in (
        (["--row", "AM"], "--row: takes NAME=PATTERN,FIELD=VALUE,..., 'AM' is not", 2),
        (["--row", "one=AM"], "--row one is given twice", 1),
        (["--row", "a=AZ"], "--row a: unknown letter 'Z'", 1),
        (["--row", "a=AM,d_modle=4"], "--row a: no field is named 'd_modle'; did you mean", 2),
        (["--row", "a=AM,learning_rate=-1"], r"--row: a: learning_rate must be in \(0, inf", 2),
        (["--row", "a=AM,learning_rate=nan"], "--row: a: learning_rate must be in", 2),
        (["--row", "a=AM,learning_rate=x"], "a: learning_rate must be a number, got x", 2),
        (["--row", "a=AM,pattern=SM"], "--row: a: pattern is given twice", 2),
        (["--row", "a=AM,d_ff=8,d_ff=9"], "--row: a: d_ff is given twice", 2),
        (["--set", "d_ff=8"], "--set: d_ff is given twice", 2),
        (["--plot", "p.bmp"], "--plot p.bmp must end in .svg, .png, .pdf", 1),
        (["--plot", "/nowhere/p.svg"], "there is no folder /nowhere", 1),
        (["--row", "a=AM,mask=content"], "--row a: mask has no effect on AM: it is for I", 1),
        (["--set", "d_conv=3"], "--set d_conv has no effect on AM, SM: it is for S with", 1),
    ):
        fails(run(*comparing(tmp_path, *words)), message, status)


@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
def test_ctrl_c_saves_and_the_command_goes_on_and_takes_more(tmp_path):
    with struck(3, where=comparison):
        done = run(*comparing(tmp_path, "--seeds", 1))
    assert done.status == 130, done.err
    assert len(list((tmp_path / "run").rglob("*.safetensors"))) == 1
    again = succeeds(run(*pasted(done.err, "stopped; to resume: "))).out
    whole = succeeds(run(*comparing(tmp_path, "--seeds", 1, name="whole"))).out
    found, wanted = ((tmp_path / name / "comparison.json").read_text() for name in ("run", "whole"))
    assert found == wanted and again.splitlines()[-3:] == whole.splitlines()[-3:]
    more = succeeds(run(*comparing(tmp_path, "--seeds", 1, "--row", "three=AM"))).out
    assert "three, seed 0" in more and "one, seed" not in more
    said = "another model: d_ff = 16, now 8"
    words = comparing(tmp_path, "--seeds", 1)
    fails(run(*("d_ff=8" if word == "d_ff=16" else word for word in words)), said)


# --- what is removed, and what isn't --------------------------------------------------------------


def test_the_name_of_a_row_never_leads_out_of_the_directory(tmp_path):
    """Refused before anything is written; what is elsewhere stays."""
    for place in (tmp_path / "seed-0", tmp_path / "precious" / "seed-0"):
        place.mkdir(parents=True)
        (place / "thesis").write_text("years of work")
    outside = ("../../precious", tmp_path / "precious", "../..", "..", ".", "a/b", "a\\b", "a\nb")
    for name in (*outside, "x" * 201):
        words = comparing(tmp_path, "--seeds", 1, rows=["--row", f"{name}=AM"])
        fails(run(*words), "argument --row: the row name", status=2)
    assert not (tmp_path / "run").exists(), "something is written"
    with pytest.raises(ValueError, match="the row name"):
        compare({"..": None}, None, None, seeds=(0,), directory=tmp_path / "run")
    assert len([*tmp_path.rglob("thesis")]) == 2


def test_a_folder_that_compare_did_not_make_is_refused_and_stays(tmp_path):
    """Somebody's finished training run; a folder elsewhere, by a link."""
    one = ["--row", "S=AM,n_heads=2"]
    words = [w for w in comparing(tmp_path, rows=[], name="runs/S/seed-0") if w != "--set"]
    sizes = [word for word in words if not str(word).startswith("d_")][1:]
    model = ["--pattern", "AM", "--set", "n_heads=2", "--set", "d_model=16", "--set", "d_ff=16"]
    succeeds(run("train", *sizes, *model))
    before = content(tmp_path / "runs")
    command = comparing(tmp_path, "--seeds", 1, rows=one)
    command[command.index("--run") + 1] = tmp_path
    fails(run(*command), "S/seed-0 was not made by this comparison: move it away")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "runs").mkdir(parents=True)
    (tmp_path / "run" / "runs" / "S").symlink_to(tmp_path / "elsewhere")
    fails(run(*comparing(tmp_path, "--seeds", 1, rows=one)), "was not made by this comparison")
    assert content(tmp_path / "runs") == before and not [*(tmp_path / "elsewhere").iterdir()]


def test_of_a_finished_run_only_what_it_made_is_removed(tmp_path):
    """A note that somebody has left beside the checkpoints stays."""
    folder, one = comparison.run_directory(tmp_path / "run", "one", 0), ROWS[:2]
    with struck(3, where=comparison):
        run(*comparing(tmp_path, "--seeds", 1, rows=one))
    (folder / "note").write_text("mine")
    (folder / step(3) / "note").write_text("mine too")
    succeeds(run(*comparing(tmp_path, "--seeds", 1, rows=one)))
    assert sorted(content(folder).values()) == [b"mine", b"mine too"]
    succeeds(run(*comparing(tmp_path, "--seeds", 1, rows=one, name="other")))
    assert not comparison.run_directory(tmp_path / "other", "one", 0).exists()


DAMAGED = ["", "[", "[" * 100_000, "5", "[]", '{"rows": {}}', '{"rows": [], "evaluations": []}']
DAMAGED += ['{"rows": {"one": 3}, "evaluations": []}', '{"rows": {}, "evaluations": [["a", 0, 1]]}']
DAMAGED += ['{"rows": {}, "evaluations": [["a", 0, 1, "x"]]}']
DAMAGED += ['{"rows": {}, "evaluations": [["a", 0, 1, NaN]]}']


def test_a_damaged_record_is_named_in_one_line_and_kept(tmp_path):
    file = tmp_path / "run" / "comparison.json"
    file.parent.mkdir()
    for text in DAMAGED:
        file.write_text(text)
        fails(run(*comparing(tmp_path, "--seeds", 1)), f"{file} is (damaged|not JSON)")
        assert file.read_text() == text and names(file.parent) == [file.name], text[:40]


def test_output_that_fails_costs_no_step(tmp_path):
    command = comparing(tmp_path, "--seeds", 1, "--evaluate-every", 3, "--steps", 5)
    screen, err = Broken(BrokenPipeError(32, "Broken pipe"), "one, seed 0: held out"), Screen()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(err):
        assert main([str(word) for word in command]) == 1
    saved = comparison.run_directory(tmp_path / "run", "one", 0) / step(3)
    said = f"Broken pipe: 'standard output'; the run has stopped after step 3, saved in {saved}\n"
    assert err.getvalue().endswith(said) and saved.exists(), err.getvalue()
    whole = succeeds(run(*command)).out.splitlines()[-3:]
    assert (
        succeeds(run(*comparing(tmp_path, *command[-6:], name="whole"))).out.splitlines()[-3:]
        == whole
    )
