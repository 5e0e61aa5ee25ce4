"""The command `budget`: its numbers are those of the functions, and of models that are made."""

import re

import pytest
import torch
from test_commands import examples_in, fails, run, succeeds

from cheems_ref.budget import activation_bytes, cache_bytes, count_flops, step_bytes, training_bytes
from cheems_ref.config import ModelConfig, preset
from cheems_ref.model import CausalLM

pytestmark = pytest.mark.usefixtures("unchecked")  # as users have it

WORDS = ["budget", "--pattern", "SRAM", "--set", "d_model=512", "--set", "vocab_size=1000"]
CONFIG = ModelConfig("SRAM", d_model=512, vocab_size=1000)
SIZES = ["--context", 3000, "--seq-len", 700, "--batch", 4]
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def cells(out, name):
    """The cells of the one line that begins with a name."""
    (line,) = (line for line in out.splitlines() if line.strip().startswith(name))
    return re.split(r"\s{2,}", line.strip())


def number(words):
    """3.14 GB, as a number."""
    digits, unit = re.match(r"([\d.e+]+) ?([kMGT]?)", words).groups()
    return float(digits) * UNITS[unit]


def is_about(words, wanted):
    """Three digits of it are printed."""
    assert abs(number(words) - wanted) <= 0.006 * wanted, f"{words}, but it is {wanted:,}"


def total(counts):
    return sum(one.total() for one in counts.values())


def test_the_table_is_that_of_the_model():
    out = succeeds(run(*WORDS, *SIZES)).out
    assert "SRAM, a vocabulary of 1,000, bfloat16\n" in out
    assert "a pass over 4 × 700 tokens:" in out
    model = CausalLM(CONFIG)
    n = sum(p.numel() for p in model.parameters())
    kept = activation_bytes(CONFIG, 700, batch=4, dtype=torch.bfloat16)
    flops = count_flops(CONFIG, 700, batch=4)
    for block in model.blocks:
        mine = sum(p.numel() for p in block.layer.parameters())
        _, layers, parameters, _, work, held = cells(out, f"{block.letter} ")
        assert (layers, parameters) == ("1", f"{mine:,}")
        is_about(work, flops[block.letter].total())
        is_about(held, kept[block.letter])
    _, layers, parameters, active, work, held = cells(out, "all")
    idle = 2 * sum(p.numel() for p in model.blocks[1].layer.experts[0].parameters())
    # A tied embedding is at work as the matrix of the logits.
    assert (layers, parameters, active) == ("4", f"{n:,}", f"{n - idle:,}")
    is_about(work, total(flops))
    is_about(held, sum(kept.values()))


def test_memory_is_that_of_weights_and_cache():
    words = ["budget", "--preset", "llama-2-7b", "--seq-len", 10]
    n = 32000 * 4096 * 2 + 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 65 * 4096
    keys = 128 * 2**30  # as the lecture has it
    rest = cache_bytes(preset("llama-2-7b"), 262_144).total() - keys
    out, _, training = succeeds(run(*words, "--context", 262_144)).out.partition("a pass")
    assert "after 1 × 262,144 tokens" in out and "does not fit into 24 GB" in out
    is_about(cells(out, "weights")[1], 2 * n)
    is_about(cells(out, "keys and values")[1], keys)
    is_about(cells(out, "states, the rest")[1], rest)
    is_about(cells(out, "together")[1], 2 * n + keys + rest)
    is_about(cells(training, "parameters, gradients, moments")[1], 16 * n)
    for memory, said in ((13.4, "does not fit"), (13.5, "fits")):
        out = succeeds(run(*words, "--context", 9, "--memory", memory)).out
        assert f", {said} into {memory} GB" in out.partition("a pass")[0]


def test_training_counts_the_gradient_of_the_logits_and_processes_share_it():
    logits = 4 * 700 * 1000 * 4
    for processes, dtype, memory, said in (
        (1, torch.bfloat16, 0.999, "does not fit"),
        (4, torch.float32, 1.001, "fits"),
    ):
        n = training_bytes(CONFIG, processes=processes)
        kept = sum(activation_bytes(CONFIG, 700, batch=4, dtype=dtype).values()) / processes
        there = n + kept + logits / processes
        words = [*WORDS, *SIZES, "--dtype", str(dtype).partition(".")[2], "--processes", processes]
        words += ["--memory", memory * there / 1e9, "--flops", 1e12]
        out = succeeds(run(*words)).out.partition("to train")[2]
        is_about(cells(out, "parameters, gradients")[1], n)
        is_about(cells(out, "activations")[1], kept)
        is_about(cells(out, "gradient of")[1], logits / processes)
        is_about(cells(out, "together")[1], there)
        assert f", {said} into " in out
        speed = re.search("at most (.*) tokens per second", out)[1].replace(",", "")
        assert abs(float(speed) / (processes * 4 * 700 / (an_update() / 1e12)) - 1) < 1e-3


def an_update():
    """Three passes, and the scores of attention once more."""
    counts = count_flops(CONFIG, 700, batch=4)
    return 3 * total(counts) + counts["A"].pairs / 2


def test_speed_is_bounded_by_what_is_scarcer():
    moved = step_bytes(CONFIG, 3000, batch=4)
    work = total(count_flops(CONFIG, 1, context=3000, batch=4))
    for words, said in (
        (["--flops", work, "--bandwidth", 2 * moved], "4 tokens per second, by the operations"),
        (["--flops", 2 * work, "--bandwidth", moved], "4 tokens per second, by the bytes"),
        (["--bandwidth", moved / 2], "2 tokens per second, by the bytes"),
    ):
        assert f"at most {said}" in succeeds(run(*WORDS, *SIZES, *words)).out


def test_the_examples_work():
    """As they stand, but for the length of the text, since long ones take seconds."""
    for words in examples_in(run("budget", "--help").out):
        out = succeeds(run(*words, "--context", 30, "--seq-len", 20)).out
        assert ('"training"' if "--json" in words else "to train on") in out


def test_a_preset_keeps_its_vocabulary_unless_another_is_set():
    name = ["budget", "--preset", "cheems-320m", "--context", 10, "--seq-len", 10]
    assert "a vocabulary of 50,277" in succeeds(run(*name)).out
    other = succeeds(run(*name, "--set", "vocab_size=300")).out
    assert "a vocabulary of 300" in other and f"{300 * preset('cheems-320m').d_model:,}" in other


def test_what_cannot_be_is_refused_in_one_line():
    for words, message, status in (
        (["--context", "-1"], "--context: must be at least 0, got -1", 2),
        (["--memory", "0"], r"--memory: must be in \(0, inf\), got 0", 2),
        (["--set", "k_keys=5"], "--set k_keys has no effect on SRAM: it is for I with mask", 1),
    ):
        fails(run(*WORDS, *words), message, status)
