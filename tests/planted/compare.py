"""Mistakes in comparisons that the properties of test_compare.py must catch."""

from planting import mistakes
from test_compare import (
    differences_are_paired,
    intervals_keep_their_word,
    zero_is_looked_for_on_both_sides,
)

from cheems_ref import compare

ROOMS = (compare,)
UNCHECKED = True

# fmt: off
MISTAKES = mistakes([
    (intervals_keep_their_word, {
        "the normal distribution's factor": [("_student(n - 1)", "1.96")],
        "the deviation of one, not of the mean": [("statistics.stdev(numbers) / math.sqrt(n)",
                                                   "statistics.stdev(numbers)")],
        "the population's deviation": [("statistics.stdev(numbers)",
                                        "statistics.pstdev(numbers)")]}),
    (differences_are_paired, {
        "the other way round": [("losses[row][seed] - losses[baseline][seed]",
                                 "losses[baseline][seed] - losses[row][seed]")]}),
    (zero_is_looked_for_on_both_sides, {
        "one side": [("abs(self.mean) <= self.half_width", "self.mean <= self.half_width")]}),
], compare)
# fmt: on
