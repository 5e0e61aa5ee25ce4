"""Mistakes in comparisons that the properties of test_compare.py must catch."""

from planting import mistakes
from test_compare import (
    a_line_cut_short_does_no_harm,
    a_run_is_that_of_train,
    all_rows_come_with_the_first_seed,
    an_evaluation_lost_with_its_process_is_kept,
    another_row_of_the_same_name_is_refused,
    checkpoints_go_when_a_run_is_done,
    differences_are_paired,
    every_row_sees_the_same_windows,
    finished_runs_are_not_run_again,
    intervals_keep_their_word,
    one_that_was_stopped_comes_to_the_same,
    student_falls_to_the_normal_s,
    the_last_evaluation_counts,
    the_table_is_student_s,
    zero_is_looked_for_on_both_sides,
)

from cheems_ref import compare

ROOMS = (compare,)
UNCHECKED = True

# fmt: off
MISTAKES = mistakes([
    (every_row_sees_the_same_windows, {
        "windows by the row": [
            ("learning_rate=rate, seed=seed)",
             "learning_rate=rate, seed=seed + ord(row.config.pattern[0]))")],
        "one seed for all": [("learning_rate=rate, seed=seed)", "learning_rate=rate, seed=0)")]}),
    (a_run_is_that_of_train, {
        "weights of what came before": [("    torch.manual_seed(seed)\n", "")],
        "the rate of the comparison": [
            ("config.learning_rate if row.learning_rate is None else row.learning_rate",
             "config.learning_rate")],
        "the row's rate for all": [("row.learning_rate is None else", "True else")],
        "in the order of the file": [
            ("sorted(found, key=lambda e: (order[e.row, e.seed], e.step))", "found[::-1]")],
        "the last evaluation alone": [("for step, nats in run.evaluations:",
                                       "for step, nats in run.evaluations[2:]:")]}),
    (all_rows_come_with_the_first_seed, {
        "row by row": [("    for seed in seeds:\n        for name, row in rows.items():\n",
                        "    for name, row in rows.items():\n        for seed in seeds:\n")]}),
    (one_that_was_stopped_comes_to_the_same, {
        "from the beginning, and beside what is there": [
            ("directory=home, **hooks", "directory=None, **hooks"),
            ("if step not in known:", "if True:"), ("shutil.rmtree(home)", "pass")],
        "twice": [("if step not in known:", "if True:")]}),
    (finished_runs_are_not_run_again, {
        "begun again": [("if any(e[:3] == (name, seed, config.steps) for e in done):",
                         "if not rows:")],
        "done with one seed, done with all": [("e[:3] == (name, seed, config.steps)",
                                               "(e[0], e[2]) == (name, config.steps)")],
        "done at the first evaluation": [("e[:3] == (name, seed, config.steps)",
                                          "e[:2] == (name, seed)")],
        "checkpoints not used": [("directory=home, **hooks", "directory=None, **hooks"),
                                 ("shutil.rmtree(home)", "pass")]}),
    (an_evaluation_lost_with_its_process_is_kept, {
        "written after updates alone": [
            ("keep(train(model, ids, _with(config, row, seed), directory=home, **hooks))",
             "train(model, ids, _with(config, row, seed), directory=home, **hooks)")]}),
    (a_line_cut_short_does_no_harm, {
        "written behind it": [("    _drop_a_cut_line(kept)\n", "")],
        "read": [('if line.endswith("\\n")]', "]")]}),
    (another_row_of_the_same_name_is_refused, {
        "taken": [("if values != mine[part]:", "if False:")],
        "models not looked at": [("dict(model=dataclasses.asdict(row.config),", "dict(model={},")],
        "texts not looked at": [("training=training, text=text)", "training=training, text=0)")],
        "evaluations may not be made oftener": [
            ('in ("seed", "evaluate_every", "checkpoint_every"):', 'in ("seed",):')],
        "the row's rate not looked at": [
            ("dataclasses.asdict(_with(config, row, seed=0))", "dataclasses.asdict(config)")],
        "what was there is forgotten": [("json.dumps(before | settings, indent=1)",
                                         "json.dumps({}, indent=1)")]}),
    (checkpoints_go_when_a_run_is_done, {
        "kept": [("    shutil.rmtree(home)\n", "")]}),
    (the_table_is_student_s, {
        "one off": [("T95 = (12.706, 4.303,", "T95 = (4.303, 4.303,")],
        "one-sided": [("3.182, 2.776", "3.182, 2.132")]}),
    (student_falls_to_the_normal_s, {
        "the normal's beyond the table": [("z + first / degrees + second", "z + 0 * second")],
        "one term": [(" + second / degrees**2 + third / degrees**3", "")],
        "n for n - 1": [("_student(n - 1)", "_student(n)")]}),
    (intervals_keep_their_word, {
        "the normal's": [("_student(n - 1)", "1.96")],
        "n for n - 1": [("_student(n - 1)", "_student(n)")],
        "of one, not of the mean": [("statistics.stdev(numbers) / math.sqrt(n)",
                                     "statistics.stdev(numbers)")],
        "the population's": [("statistics.stdev(numbers)", "statistics.pstdev(numbers)")]}),
    (differences_are_paired, {
        "the other way round": [("losses[row][seed] - losses[baseline][seed]",
                                 "losses[baseline][seed] - losses[row][seed]")],
        "seeds of one alone": [("losses[row].keys() & losses[baseline].keys()",
                                "losses[row].keys() | losses[baseline].keys()"),
                               ("losses[row][seed]", "losses[row].get(seed, 0)"),
                               ("losses[baseline][seed]", "losses[baseline].get(seed, 0)")]}),
    (zero_is_looked_for_on_both_sides, {
        "above alone": [("abs(self.mean) <= self.half_width", "self.mean <= self.half_width")],
        "the end left out": [("abs(self.mean) <= self.half_width",
                              "abs(self.mean) < self.half_width")]}),
    (the_last_evaluation_counts, {
        "the first": [("key=lambda e: e.step):\n        l", "key=lambda e: -e.step):\n        l")],
        "the last of the file": [("sorted(evaluations, key=lambda e: e.step)", "evaluations")]}),
], compare)
# fmt: on
