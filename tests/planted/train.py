"""Mistakes that the properties of test_train.py must catch."""

from planting import mistakes
from test_train import (
    bfloat16_is_near,
    clips_all_gradients_together,
    decays_what_has_two_axes,
    evaluation_changes_nothing,
    evaluation_is_one_by_one,
    follows_the_schedule,
    rates_are_those_by_hand,
    rises_evenly_and_falls_to_its_end,
    seeds_decide,
    the_end_is_held_out,
    trains_on_one_part_and_evaluates_on_the_other,
    updates_are_adamw,
    windows_are_any_of_the_text,
)

from cheems_ref import train

ROOMS = (train,)

CLIP = "torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.max_grad_norm)"
UNCLIPPED = "torch.zeros(())"
TOTAL = "    device, total = model.embedding.weight.device, 0.0\n"
FINITE = "if not (math.isfinite(value) and bool(norm.isfinite())):"

# fmt: off
MISTAKES = mistakes([
    (rates_are_those_by_hand, {
        "warm-up starts at 0": [("* (step + 1) / rising", "* step / rising")],
        "warm-up rounded down": [("math.ceil(config.warmup", "int(config.warmup")],
        "the last step does not reach the end": [
            ("max(1, n - 1 - rising)", "max(1, n - rising)")],
        "the schedule is not looked at": [
            ("n = config.decay_steps or config.steps", "n = config.steps")],
        "the rate goes on": [("    step = min(step, n - 1)\n", "")],
        "a straight line": [("(1 + math.cos(math.pi * progress)) / 2", "(1 - progress)")]}),
    (rises_evenly_and_falls_to_its_end, {
        "cosine reversed": [("(1 + math.cos", "(1 - math.cos")],
        "the end is 0": [("config.min_lr_ratio + (1 - config.min_lr_ratio) *", "1.0 *")],
        "the end is not a share": [("= config.min_lr_ratio +", "= config.min_lr_ratio / 2 +")]}),
    (decays_what_has_two_axes, {
        "decay on vectors": [("weight_decay=0.0", "weight_decay=config.weight_decay")],
        "no decay on three axes": [("parameter.ndim >= 2", "parameter.ndim == 2")],
        "betas of torch": [("        betas=config.betas,\n", "")]}),
    (updates_are_adamw, {
        "decay on vectors": [("weight_decay=0.0", "weight_decay=config.weight_decay")],
        "Adam": [("torch.optim.AdamW(\n", "torch.optim.Adam(\n")],
        "no clip": [(CLIP, UNCLIPPED)],
        "every gradient clipped by itself": [
            (CLIP,
             CLIP.replace("run.model.parameters()", "[p]").replace("torch", "[torch", 1)
             + " for p in run.model.parameters()][0]")],
        "clipped after the update": [
            (CLIP, UNCLIPPED),
            ("run.optimizer.step()\n", f"run.optimizer.step()\n    {CLIP}\n")],
        "gradients pile up": [("run.optimizer.zero_grad()", "pass")],
        "targets not moved": [("windows[:, 1:].flatten()", "windows[:, :-1].flatten()")],
        "loss after the update": [
            ("append(value)", "append(_loss(run.model, windows).item())")]}),
    (clips_all_gradients_together, {
        "values clipped": [(CLIP, f"{UNCLIPPED}\n    {CLIP.replace('norm_', 'value_')}")],
        "no clip": [(CLIP, UNCLIPPED)]}),
    (follows_the_schedule, {
        "rate not set": [('group["lr"] = learning_rate(run.step, config)', "pass")],
        "rate of the next update": [
            ("learning_rate(run.step, config)", "learning_rate(run.step + 1, config)")],
        "rate of matrices only": [
            ("in run.optimizer.param_groups:", "in run.optimizer.param_groups[:1]:")],
        "after_step left out": [("after_step(run)", "pass")],
        "after_step only with a checkpoint": [
            ("if after_step is not None", "if after_step is not None and run.step % 4 == 0")]}),
    (the_end_is_held_out, {
        "the start is held out": [
            ("return ids[:n], ids[n:]", "return ids[len(ids) - n :], ids[: len(ids) - n]")],
        "a token in both": [("return ids[:n], ids[n:]", "return ids[: n + 1], ids[n:]")],
        "rounded down": [("math.ceil(held_out", "int(held_out")]}),
    (windows_are_any_of_the_text, {
        "beyond the end": [
            ("torch.randint(len(ids) - config.seq_len,",
             "torch.randint(len(ids) - config.seq_len + 1,")],
        "the last window is never drawn": [
            ("torch.randint(len(ids) - config.seq_len,",
             "torch.randint(len(ids) - config.seq_len - 1,")],
        "the first window is never drawn": [
            ("torch.randint(len(ids)", "torch.randint(1, len(ids)")],
        "one start for all": [("(config.batch_size,), generator", "(1,), generator")],
        "nothing to predict": [
            ("torch.arange(config.seq_len + 1)", "torch.arange(config.seq_len)")]}),
    (trains_on_one_part_and_evaluates_on_the_other, {
        "windows of the whole text": [
            ("_step(run, training)\n            seconds",
             "_step(run, run.ids)\n            seconds")],
        "evaluates on what is trained on": [
            ("_evaluate(run, held_out)\n            _show",
             "_evaluate(run, training)\n            _show")],
        "evaluates on all": [
            ("_evaluate(run, held_out)\n            _show",
             "_evaluate(run, run.ids)\n            _show")]}),
    (evaluation_is_one_by_one, {
        "targets not moved": [("windows[:, 1:].flatten()", "windows[:, :-1].flatten()")],
        "windows overlap": [
            ("range(0, len(ids) - 1, length)", "range(0, len(ids) - 1, length - 1)")],
        "tokens between windows left out": [
            ("range(0, len(ids) - 1, length)", "range(0, len(ids) - 1, length + 1)")],
        "the end left out": [("[*batches, [last]]", "batches")],
        "the end counted twice": [("[*batches, [last]]", "[*batches, [last], [last]]")],
        "the first token counted": [
            ("world_size) / (len(ids) - 1)", "world_size) / len(ids)")],
        "a mean of means": [
            ('reduction="sum").item()',
             'reduction="mean").item() * (len(ids) - 1) / (len(batches) + 1)')],
        "bits": [("world_size) / (len(ids)", "world_size) / math.log(2) / (len(ids)")],
        "the first windows only": [
            ("range(0, len(whole), batch_size)",
             "range(0, len(whole) // batch_size * batch_size, batch_size)")]}),
    (evaluation_changes_nothing, {
        "evaluation mode stays": [(TOTAL, TOTAL + "    model.eval()\n")],
        "gradients are dropped": [
            (TOTAL, TOTAL + "    model.zero_grad()\n")],
        "some windows at random": [
            (TOTAL, TOTAL + "    total = torch.rand(1).item() * 0\n")]}),
    (seeds_decide, {
        "one seed for all": [(".manual_seed(config.seed)", ".manual_seed(0)")],
        "no generator": [(", generator=generator)\n    return", ")\n    return")]}),
    (bfloat16_is_near, {
        "left out": [('precision == "bfloat16" or', "False or")],
        "always": [('precision == "bfloat16" or', "True or")]}),
])
