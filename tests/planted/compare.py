"""Mistakes in comparisons that the properties of test_compare.py must catch."""

from planting import mistakes
from test_compare import (
    differences_are_paired,
    holm_stops_at_the_first_that_fails,
    intervals_keep_their_word,
    of_many_calls_few_are_false,
    one_deviation_serves_a_table,
    zero_is_looked_for_on_both_sides,
)

from cheems_ref import compare

ROOMS = (compare,)
UNCHECKED = True

# fmt: off
MISTAKES = mistakes([
    (intervals_keep_their_word, {
        "the normal distribution's factor": [("student_t(n - 1)", "1.96")],
        "the deviation of one, not of the mean": [("statistics.stdev(numbers) / math.sqrt(n)",
                                                   "statistics.stdev(numbers)")],
        "the population's deviation": [("statistics.stdev(numbers)",
                                        "statistics.pstdev(numbers)")]}),
    (differences_are_paired, {
        "the other way round": [("{row: 1, baseline: -1}", "{row: -1, baseline: 1}")],
        "one degree of freedom too many": [("(statistics.stdev(apart), n - 1)",
                                            "(statistics.stdev(apart), n)")]}),
    (holm_stops_at_the_first_that_fails, {
        "no correction": [("level / (m - i)", "level")],
        "Bonferroni's": [("level / (m - i)", "level / m")],
        "goes on after a failure": [("            break\n", "            continue\n")]}),
    (of_many_calls_few_are_false, {
        "no correction": [("level / (m - i)", "level")],
        "what a seed does to all rows stays in": [("- x.mean(0) + x.mean()", "")]}),
    (one_deviation_serves_a_table, {
        "degrees of rows times seeds": [("(x.shape[0] - 1) * (x.shape[1] - 1)",
                                         "x.numel()")],
        "weights that only add up": [("math.hypot(*weights.values())",
                                      "sum(map(abs, weights.values()))")]}),
    (zero_is_looked_for_on_both_sides, {
        "one side": [("abs(self.mean) <= self.half_width", "self.mean <= self.half_width")]}),
], compare)
# fmt: on
