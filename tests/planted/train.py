"""Mistakes that the properties of test_train.py must catch."""

from planting import mistakes
from test_train import HELD as HELD
from test_train import (
    decays_what_has_two_axes,
    evaluation_is_one_by_one,
    rates_are_those_by_hand,
    trains_on_one_part_and_evaluates_on_the_other,
    updates_are_adamw,
)

from cheems_ref import train

ROOMS = (train,)

CLIP = "run.clip_gradients()"
UNCLIPPED = "torch.zeros(())"

# fmt: off
MISTAKES = mistakes([
    (rates_are_those_by_hand, {
        "warm-up starts at 0": [("* (step + 1) / rising", "* step / rising")],
        "the last step does not reach the end": [
            ("max(1, n - 1 - rising)", "max(1, n - rising)")]}),
    (decays_what_has_two_axes, {
        "decay on vectors": [("weight_decay=0.0", "weight_decay=config.weight_decay")]}),
    (updates_are_adamw, {
        "Adam": [("torch.optim.AdamW(groups", "torch.optim.Adam(groups")],
        "clipped after the update": [
            (CLIP, UNCLIPPED),
            ("run.optimizer.step()\n", f"run.optimizer.step()\n    {CLIP}\n")],
        "targets not moved": [("windows[:, 1:].flatten()", "windows[:, :-1].flatten()")]}),
    (trains_on_one_part_and_evaluates_on_the_other, {
        "windows of the whole text": [("_step(run, training)\n            seconds",
                                       "_step(run, run.ids)\n            seconds")]}),
    (evaluation_is_one_by_one, {
        "tokens between windows left out": [
            ("range(0, len(ids) - 1, seq_len)", "range(0, len(ids) - 1, seq_len + 1)")],
        "a mean of means": [
            ('reduction="sum").item()',
             'reduction="mean").item() * (len(ids) - 1) / '
             "len([*evaluation_windows(ids, seq_len, batch_size)])")]}),
])
