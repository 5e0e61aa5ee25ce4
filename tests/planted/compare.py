"""Mistakes in comparisons that the properties of test_compare.py must catch."""

from planting import mistakes
from test_compare import (
    differences_are_paired,
    intervals_keep_their_word,
    student_falls_to_the_normal_s,
    the_table_is_student_s,
    zero_is_looked_for_on_both_sides,
)

from cheems_ref import compare

ROOMS = (compare,)
UNCHECKED = True

# fmt: off
MISTAKES = mistakes([
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
], compare)
# fmt: on
