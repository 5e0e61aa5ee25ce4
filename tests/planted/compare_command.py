"""Mistakes in the command `compare` that the properties of test_compare_command.py must catch."""

from planting import mistakes
from test_compare_command import (
    a_difference_is_claimed_where_the_interval_says_so,
    a_folder_is_a_corpus,
    a_plot_is_drawn,
    is_what_python_compares,
    the_table_is_drawn_in_its_place,
    the_table_tells_what_was_found,
)

from cheems_ref import compare_command

ROOMS = (compare_command,)
UNCHECKED = True

# fmt: off
MISTAKES = mistakes([
    (is_what_python_compares, {
        "rates left out": [('rate = fields.pop("learning_rate", None)',
                            'rate = fields.pop("learning_rate", None) and None')],
        "heads of no row": [('**common, **fields}', '**common, **fields, "n_heads": 4}')],
        "one seed": [("range(a.seeds)", "range(1)")],
        "length left out": [
            ("if k in names and v is not None", 'if k in names - {"length"} and v')]}),
    (the_table_tells_what_was_found, {
        "the first evaluation": [("if e.step == steps]", "if e.step == 2]")],
        "layers left out": [("counts = count_parameters(row.config).values()",
                             "counts = [*count_parameters(row.config).values()][1:]")],
        "the baseline less the row": [("difference(losses, name, baseline)",
                                       "difference(losses, baseline, name)")],
        "two decimals": [("{number.mean:{sign}.3f}", "{number.mean:{sign}.2f}")]}),
    (a_difference_is_claimed_where_the_interval_says_so, {
        "always": [("if apart.holds_zero else", "if False else")],
        "the other way round": [("'no difference' if apart", "'a difference' if apart")],
        "of one seed": [("if math.isinf(apart.half_width):", "if False:")],
        "all seeds that there are": [("if e.seed in seeds]", "]")],
        "runs that are not finished": [("[e for e in evaluations if e.step == steps]",
                                        "evaluations")]}),
    (the_table_is_drawn_in_its_place, {
        "below": [('f"\\x1b[{self.drawn}A\\x1b[J" if self.drawn else ""', '""')],
        "everywhere": [("sys.stdout.isatty()", "True")],
        "a line too high": [("self.drawn = len(lines)", "self.drawn = len(lines) + 1")]}),
    (a_folder_is_a_corpus, {
        "the folder above": [("read_corpus(path, held_out=held_out)",
                              "read_corpus(Path(path).parent, held_out=held_out)")],
        "a tenth": [("read_corpus(path, held_out=held_out)", "read_corpus(path)")]}),
    (a_plot_is_drawn, {
        "not at all": [("    fig.savefig(path)\n", "")]}),
], compare_command)
# fmt: on
