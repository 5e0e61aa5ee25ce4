"""The command `budget`: its numbers are those of the functions, and of models that are made."""

import dataclasses
import re

import pytest
import torch
from test_command_line import examples_in, run, succeeds

from cheems_ref import budget_command
from cheems_ref.budget import activation_bytes, cache_bytes, count_flops, step_bytes
from cheems_ref.model import CausalLM, ModelConfig, preset

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

WORDS = ["budget", "--pattern", "SRAM", "--set", "d_model=512", "--set", "vocab_size=1000"]
CONFIG = ModelConfig("SRAM", d_model=512, vocab_size=1000)
SIZES = ["--context", 3000, "--length", 700, "--batch", 4]


def cells(out, name):
    """The numbers of the line that begins with a name."""
    (line,) = (line for line in out.splitlines() if line.strip().startswith(name))
    return re.split(r"\s{2,}", line.strip().partition(",")[0] if "GB," in line else line.strip())


def total(counts):
    return sum(one.total() for one in counts.values())


def gigabytes(size):
    return f"{size / 1e9:,.3f} GB"


def the_table_is_that_of_the_model(m):
    out = succeeds(run(m, *WORDS, *SIZES)).out
    assert "SRAM, a vocabulary of 1,000, bfloat16\na pass over 4 × 700 tokens:" in out
    model = CausalLM(CONFIG)
    n = sum(p.numel() for p in model.parameters())
    kept = activation_bytes(CONFIG, 700, batch=4, dtype=torch.bfloat16)
    flops = count_flops(CONFIG, 700, batch=4)
    for block in model.blocks:
        mine = sum(p.numel() for p in block.layer.parameters())
        name, layers, parameters, _, work, held = cells(out, f"{block.letter} ")
        assert (layers, parameters, held) == ("1", f"{mine:,}", gigabytes(kept[block.letter]))
        assert work == f"{flops[block.letter].total() / 1e9:,.1f} G", name
    name, layers, parameters, active, work, held = cells(out, "all")
    idle = 2 * sum(p.numel() for p in model.blocks[1].layer.experts[0].parameters())
    assert (layers, parameters) == ("4", f"{n:,}")
    # A tied embedding is at work as the matrix of the logits.
    assert active == f"{n - idle:,}"
    assert work == f"{total(flops) / 1e9:,.1f} G" and held == gigabytes(sum(kept.values()))


def memory_is_that_of_weights_and_cache(m):
    out = succeeds(run(m, "budget", "--preset", "llama-2-7b", "--context", 262_144)).out
    n = 32000 * 4096 * 2 + 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 65 * 4096
    keys = 128 * 2**30  # as the lecture has it
    assert "after 1 × 262,144 tokens" in out
    assert cells(out, "weights")[1] == gigabytes(2 * n)
    assert cells(out, "keys and values")[1] == gigabytes(keys)
    rest = cache_bytes(preset("llama-2-7b"), 262_144).total() - keys
    assert cells(out, "states, the rest")[1] == gigabytes(rest)
    assert f"{gigabytes(2 * n + keys + rest)}, does not fit into 24 GB" in out
    more = succeeds(run(m, "budget", "--preset", "llama-2-7b", "--context", 9, "--memory", 13.5))
    assert "fits into 13.5 GB" in more.out.partition("to train")[0]
    assert f"{gigabytes(16 * n)}\n" in more.out


def a_batch_and_a_dtype_are_taken(m):
    out = succeeds(run(m, *WORDS, *SIZES, "--dtype", "float32")).out
    cache = cache_bytes(CONFIG, 3000, batch=4, dtype=torch.float32)
    assert cells(out, "keys and values")[1] == gigabytes(cache.keys_values)
    moved = step_bytes(CONFIG, 3000, batch=4, dtype=torch.float32)
    work = total(count_flops(CONFIG, 1, context=3000, batch=4))
    assert f"{work / 1e9:,.2f} G operations, {gigabytes(moved)} moved" in out
    kept = sum(activation_bytes(CONFIG, 700, batch=4).values())
    assert cells(out, "kept for")[1] == gigabytes(kept)
    update = 3 * total(count_flops(CONFIG, 700, batch=4))
    assert f"an update: {update / 1e12:,.2f} T operations" in out
    assert "at most" not in out


def speed_is_bounded_by_what_is_scarcer(m):
    moved = step_bytes(CONFIG, 3000, batch=4)
    work = total(count_flops(CONFIG, 1, context=3000, batch=4))
    for flops, bandwidth, said in (
        (work, 2 * moved, "at most 4 tokens per second, by the operations"),
        (2 * work, moved, "at most 4 tokens per second, by the bytes"),
        (None, moved / 2, "at most 2 tokens per second, by the bytes"),
        (3 * work, None, "at most 12 tokens per second, by the operations"),
    ):
        words = ["--flops", flops] * (flops is not None)
        words += ["--bandwidth", bandwidth] * (bandwidth is not None)
        assert said in succeeds(run(m, *WORDS, *SIZES, *words)).out
    update = 3 * total(count_flops(CONFIG, 700, batch=4))
    out = succeeds(run(m, *WORDS, *SIZES, "--flops", update)).out
    assert "at most 2,800 tokens per second" in out.partition("to train")[2]


def a_length_that_is_not_given_is_the_context(m):
    out = succeeds(run(m, *WORDS, "--context", 50)).out
    assert "a pass over 1 × 50 tokens" in out and "after 1 × 50 tokens" in out


def a_plot_is_drawn(m, folder):
    done = succeeds(run(m, *WORDS, "--plot", folder / "plot.svg"))
    assert f"drawn: {folder / 'plot.svg'}" in done.out
    assert (folder / "plot.svg").exists()
    assert (folder / "plot.svg").read_text().count("</svg>") == 1


PROPERTIES = [
    the_table_is_that_of_the_model,
    memory_is_that_of_weights_and_cache,
    a_batch_and_a_dtype_are_taken,
    speed_is_bounded_by_what_is_scarcer,
    a_length_that_is_not_given_is_the_context,
]


@pytest.mark.parametrize("has_property", PROPERTIES)
def test_budget_command(has_property):
    has_property(budget_command)


def test_a_plot_is_drawn(tmp_path):
    a_plot_is_drawn(budget_command, tmp_path)


def test_the_examples_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in examples_in(run(budget_command, "budget", "--help").out):
        assert "to train on" in succeeds(run(budget_command, *words)).out
    assert (tmp_path / "memory.svg").exists()


def test_a_preset_keeps_its_vocabulary_unless_another_is_set():
    name = ["budget", "--preset", "cheems-320m", "--context", 10]
    assert "a vocabulary of 50,277" in succeeds(run(budget_command, *name)).out
    other = succeeds(run(budget_command, *name, "--set", "vocab_size=300")).out
    assert "a vocabulary of 300" in other
    small = dataclasses.replace(preset("cheems-320m"), vocab_size=300)
    assert f"{small.vocab_size * small.d_model:,}" in other


@pytest.mark.parametrize(
    "words, message",
    [
        (["--context", "-1"], "--context must be at least 0, got -1"),
        (["--length", "0"], "--length must be at least 1, got 0"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--memory", "0"], "--memory must be positive, got 0"),
        (["--flops", "-1"], "--flops must be positive, got -1"),
        (["--bandwidth", "inf"], "--bandwidth must be positive, got inf"),
        (["--plot", "x.jpg"], "--plot takes a file that ends in .png, .svg or .pdf, got x.jpg"),
        (["--preset", "cheems-tiny"], "give --preset or --pattern, not both"),
        (["--set", "d_modle=4"], "did you mean d_model?"),
        (["--set", "d_model=5"], "n_heads"),
        (["--pattern", "SZ"], "unknown letter 'Z'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, message):
    done = run(budget_command, *WORDS, *words)
    assert done.status == 1 and done.err.count("\n") == 1
    assert message in done.err
