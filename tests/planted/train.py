"""Mistakes that the properties of test_train.py must catch."""

from planting import mistakes
from test_train import (
    begins_once,
    bfloat16_is_near,
    clips_all_gradients_together,
    decays_what_has_two_axes,
    evaluates_and_saves_when_told,
    evaluation_changes_nothing,
    evaluation_is_one_by_one,
    follows_the_schedule,
    rates_are_those_by_hand,
    rises_evenly_and_falls_to_its_end,
    seeds_decide,
    stops_at_a_loss_that_is_no_number,
    stops_before_it_saves_what_cannot_be_evaluated,
    the_bar_is_as_told,
    the_end_is_held_out,
    trains_on_one_part_and_evaluates_on_the_other,
    updates_are_adamw,
    windows_are_any_of_the_text,
)

from cheems_ref import checkpoint, train

ROOMS = (checkpoint, train)

CLIP = "torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip)"
UNCLIPPED = "torch.zeros(())"
FINITE = "if not (math.isfinite(value) and bool(norm.isfinite())):"

# fmt: off
MISTAKES = mistakes([
    (rates_are_those_by_hand, {
        "warm-up starts at 0": [("* (step + 1) / rising", "* step / rising")],
        "warm-up rounded down": [("math.ceil(config.warmup", "int(config.warmup")],
        "the last step does not reach the end": [
            ("max(1, n - 1 - rising)", "max(1, n - rising)")],
        "the schedule is not looked at": [
            ("n = config.schedule or config.steps", "n = config.steps")],
        "the rate goes on": [("    step = min(step, n - 1)\n", "")],
        "a straight line": [("(1 + math.cos(math.pi * progress)) / 2", "(1 - progress)")]}),
    (rises_evenly_and_falls_to_its_end, {
        "cosine reversed": [("(1 + math.cos", "(1 - math.cos")],
        "the end is 0": [("config.final + (1 - config.final) *", "1.0 *")],
        "the end is not a share": [("share = config.final +", "share = config.final / 2 +")]}),
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
            ("torch.randint(len(ids) - config.length,",
             "torch.randint(len(ids) - config.length + 1,")],
        "the last window is never drawn": [
            ("torch.randint(len(ids) - config.length,",
             "torch.randint(len(ids) - config.length - 1,")],
        "the first window is never drawn": [
            ("torch.randint(len(ids)", "torch.randint(1, len(ids)")],
        "one start for all": [("(config.batch_size,), generator", "(1,), generator")],
        "nothing to predict": [
            ("torch.arange(config.length + 1)", "torch.arange(config.length)")]}),
    (trains_on_one_part_and_evaluates_on_the_other, {
        "windows of the whole text": [
            ("_update(run, training)\n            seconds",
             "_update(run, ids)\n            seconds")],
        "evaluates on what is trained on": [
            ("_note_evaluation(run, held_out)\n            if",
             "_note_evaluation(run, training)\n            if")],
        "evaluates on all": [
            ("_note_evaluation(run, held_out)\n            if",
             "_note_evaluation(run, ids)\n            if")]}),
    (evaluation_is_one_by_one, {
        "targets not moved": [("windows[:, 1:].flatten()", "windows[:, :-1].flatten()")],
        "windows overlap": [
            ("range(0, len(ids) - 1, length)", "range(0, len(ids) - 1, length - 1)")],
        "tokens between windows left out": [
            ("range(0, len(ids) - 1, length)", "range(0, len(ids) - 1, length + 1)")],
        "the end left out": [("[*batches, rest] if rest else batches", "batches")],
        "the end counted twice": [("[*batches, rest] if", "[*batches, rest, rest] if")],
        "the first token counted": [
            ("model) / (len(ids) - 1)", "model) / len(ids)")],
        "a mean of means": [
            ('reduction="sum").item()',
             'reduction="mean").item() * (len(ids) - 1) / len(windows)')],
        "bits": [("model) / (len(ids)", "model) / math.log(2) / (len(ids)")],
        "the first windows only": [
            ("range(0, len(whole), batch_size)",
             "range(0, len(whole) // batch_size * batch_size, batch_size)")]}),
    (evaluation_changes_nothing, {
        "evaluation mode stays": [("    total = 0.0\n", "    total = 0.0\n    model.eval()\n")],
        "gradients are dropped": [
            ("    total = 0.0\n", "    total = 0.0\n    model.zero_grad()\n")],
        "some windows at random": [
            ("    total = 0.0\n", "    total = torch.rand(1).item() * 0\n")]}),
    (evaluates_and_saves_when_told, {
        "not evaluated at the end": [
            ("_is_due(run, config.evaluate_every)", "run.step % config.evaluate_every == 0")],
        "not saved at the end": [
            ("_is_due(run, config.checkpoint_every)",
             "run.step % config.checkpoint_every == 0")],
        "evaluated when saved": [
            ("_is_due(run, config.evaluate_every)", "_is_due(run, config.checkpoint_every)")],
        "in other windows": [("held_out, length=run.config.length)", "held_out)")],
        "all are kept": [("in mine[:-2]:", "in mine[:0]:")],
        "one is kept": [("in mine[:-2]:", "in mine[:-1]:")],
        "the first two are kept": [("in mine[:-2]:", "in mine[2:]:")],
        "the oldest is the newest": [("return found[-1]", "return found[0]")]}),
    (seeds_decide, {
        "one seed for all": [(".manual_seed(config.seed)", ".manual_seed(0)")],
        "no generator": [(", generator=generator)\n    return", ")\n    return")]}),
    (stops_at_a_loss_that_is_no_number, {
        "not looked at": [(FINITE, "if norm is None:")],
        "looked at after the update": [
            (FINITE, "run.optimizer.step()\n    " + FINITE),
            ("    run.optimizer.step()\n    run.losses", "    run.losses")],
        "looked at after the loss is noted": [
            (FINITE, "run.losses.append(float(value))\n    " + FINITE),
            ("    run.losses.append(value)\n", "")],
        "saved before it is looked at": [
            ("            _update(run, training)\n",
             "            directory is None or save(run, directory)\n"
             "            _update(run, training)\n")]}),
    (stops_before_it_saves_what_cannot_be_evaluated, {
        "not looked at": [("    if not math.isfinite(nats):\n", "    if False:\n")]}),
    (begins_once, {
        "before it is restored": [
            ("    if at_start is not None:\n        at_start(run)\n", ""),
            ("    if directory is not None:\n        Path",
             "    if at_start is not None:\n        at_start(run)\n"
             "    if directory is not None:\n        Path")],
        "not said": [("        at_start(run)\n", "        pass\n")]}),
    (bfloat16_is_near, {
        "left out": [('precision == "bfloat16" or', "False or")],
        "always": [('precision == "bfloat16" or', "True or")]}),
    (the_bar_is_as_told, {
        "the wrong way": [("else not bar", "else bar")],
        "always shown": [("None if bar is None else not bar", "False")],
        "never by itself": [("return None if bar is None", "return True if bar is None")],
        "starts at 0": [("initial=run.step, ", "")],
        "tokens that are not predicted counted": [
            ("batch_size * run.config.length", "batch_size * (run.config.length + 1)")],
        "without numbers": [("progress.set_postfix(shown, refresh=False)", "pass")]}),
])
