"""Mistakes that the properties of test_check.py must catch."""

from planting import mistakes
from test_check import (
    compiles,
    looks_at_no_value,
    looks_at_values_at_the_door_alone,
    refuses,
    returns_the_sizes,
    takes,
)

from cheems_ref import check

ROOMS = (check,)
UNCHECKED = True  # the type checker would answer first

WHILE_COMPILING = "    if torch.compiler.is_compiling():\n        return\n"
BIND = "sizes.setdefault(letter, size)"

# fmt: off
MISTAKES = mistakes([
    (refuses, "shapes", {
        "the first tensor binds nothing": [(BIND, "pass")],
        "the last tensor binds": [(BIND, "sizes[letter] = size")],
        "None ends the check": [("            continue\n", "            break\n")]}),
    (returns_the_sizes, "shapes", {
        "writes into the caller's sizes": [
            ("sizes = dict(known or {})", "sizes = known if known is not None else {}")]}),
    (refuses, "entries", {
        "NaN is let through": [
            ("return above and below",
             "return not (value < low or value > high) if value != value else above and below")],
        "only the smallest entry": [
            ("_inside(low, interval) and _inside(high, interval)", "_inside(low, interval)")]}),
    (takes, "numbers", {
        "only Python's own numbers": [
            ("if not isinstance(value, Real)", "if not isinstance(value, float | int)")]}),
    (looks_at_values_at_the_door_alone, "entries", {
        "one question for each entry": [
            ("(end.item() for end in t.detach().aminmax())",
             "min(ends := [end.item() for end in t.flatten()]), max(ends)")]}),
    (compiles, "all", {
        "values break the graph": [(WHILE_COMPILING, "")]}),
    (looks_at_no_value, "mixer_call", {
        "a mixer looks at its positions": [
            ('    shapes(known, position_ids=(position_ids, "b l"))\n',
             '    shapes(known, position_ids=(position_ids, "b l"))\n'
             '    entries("(-inf, inf)", position_ids=position_ids)\n')]}),
    (refuses, "sizes", {
        "True is a size": [(" or isinstance(size, bool)", "")]}),
    (refuses, "token_ids", {
        "the vocabulary ends one too late": [
            ('entries(f"[0, {vocab_size})"', 'entries(f"[0, {vocab_size}]"')]}),
])
