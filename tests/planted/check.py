"""Mistakes that the properties of test_check.py must catch."""

import test_check as tests
from planting import mistakes

from cheems_ref import check

ROOMS = (check,)
UNCHECKED = True  # the type checker would answer first

WHILE_COMPILING = "    if not values_can_be_read():\n        return\n"

# fmt: off
MISTAKES = mistakes([
    (tests.refuses, "shapes", {
        "the last tensor binds": [("sizes.setdefault(letter, size)", "sizes[letter] = size")]}),
    (tests.refuses, "entries", {
        "NaN is let through": [
            ("return above and below",
             "return not (value < low or value > high) if value != value else above and below")]}),
    (tests.looks_at_values_at_the_door_alone, "entries", {
        "one question for each entry": [
            ("(end.item() for end in t.detach().aminmax())",
             "min(ends := [end.item() for end in t.flatten()]), max(ends)")]}),
    (tests.compiles, {
        "values break the graph": [(WHILE_COMPILING, "")]}),
    (tests.looks_at_no_value, "mixer_call", {
        "a mixer looks at its positions": [
            ('    shapes(known, position_ids=(position_ids, "b l"))\n',
             '    shapes(known, position_ids=(position_ids, "b l"))\n'
             '    entries("(-inf, inf)", position_ids=position_ids)\n')]}),
    (tests.refuses, "token_ids", {
        "the vocabulary ends one too late": [
            ('entries(f"[0, {vocab_size})"', 'entries(f"[0, {vocab_size}]"')]}),
])
# fmt: on
HELD = {mistake.asked() for mistake in MISTAKES}  # test_check.py asks all of them
