"""The self-test in book/manual/reading_the_course.md has the answers that the package computes."""

import math
import re
from pathlib import Path

import torch

from cheems_ref.compare import interval
from cheems_ref.linear_attention import delta_rule
from cheems_ref.retrieval import PEER
from cheems_ref.roofline import Recorder
from cheems_ref.rope import rope_frequencies
from cheems_ref.ssd import semiseparable_matrix
from cheems_ref.state_space import ssm_kernel

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book/manual/reading_the_course.md").read_text(encoding="utf-8")


def test_answers_of_the_self_test():
    one, steps, key = torch.ones(1, 1), torch.ones(1, 4, 1), torch.tensor([[[[1.0, 0.0]]]])
    written = delta_rule(key, key, torch.full((1, 1, 1, 1), 5.0), one[None], initial_state=2 * key)
    rate = torch.tensor([-math.log(2)])
    M = semiseparable_matrix(steps, rate, steps[..., None], steps[..., None])
    with Recorder() as recorder:
        _ = torch.ones(60, 60) @ torch.ones(60, 60)
    product = recorder.operators[-1]
    truth = {
        "a": ssm_kernel(0.5 * one, one[0], one[0], 4)[3].item(),
        "b": written.item(),
        "c": M[0, 0, 3, 1].item(),
        "d": rope_frequencies(64)[16].item(),
        "e": torch.tensor([-math.log(2), 0.0]).softmax(0)[0].item(),
        "f": PEER(8, n_experts=10_000, n_heads=1, k=1, d_query=8).keys[..., 0].numel(),
        "g": int(interval([-0.03, -0.01, -0.02]).holds_zero),
        "h": product.flops / product.moved,
    }
    letters, numbers = re.search(r"^\| (a \| b .*) \|\n.*\n\| (.*) \|$", PAGE, re.M).groups()
    printed = dict(zip(letters.split(" | "), map(float, numbers.split(" | ")), strict=True))
    assert printed.keys() == truth.keys()
    for letter, number in printed.items():
        assert abs(number - truth[letter]) < 5e-4, letter
    asked = re.findall(r"^- \*\*(\w)\.\*\* \((\d\d)\)", PAGE, re.M)
    assert [letter for letter, _ in asked] == list(printed)


def test_every_chapter_is_in_the_table():
    chapters = {path.name[:2] for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert chapters == set(re.findall(r"^\| (\d\d) ", PAGE, re.M))
