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

BELOW, ABOVE = 'low <= value if interval[0] == "["', 'value <= high if interval[-1] == "]"'
TENSORS = "        if t is not None and t.numel() and not t.is_meta:"
WHILE_COMPILING = "    if torch.compiler.is_compiling():\n        return\n"
BOUND = "sizes.setdefault(letter, size) == size"

# fmt: off
MISTAKES = mistakes([
    (refuses, "shapes", {
        "the first tensor binds nothing": [(BOUND, "sizes.get(letter, size) == size")],
        "the last tensor binds": [(BOUND, "sizes.update({letter: size}) is None")],
        "letters of the caller bind nothing": [("dict(known or {})", "{}")],
        "axes too many or too few": [
            ("fits, bound = t.ndim == len(letters)", "fits, bound = True")],
        "only the last axis counts": [("fits = fits and ", "fits = ")],
        "the tensor's own sizes are called for": [
            ("bound.get(letter, letter)", "sizes.get(letter, letter)")],
        "no numbers": [("any(letter in bound for letter in letters)", "False")],
        "None ends the check": [("            continue\n", "            break\n")],
        "a tuple of one without its comma": [
            ('f"({parts[0]},)" if len(parts) == 1', 'f"({parts[0]})" if len(parts) == 1')]}),
    (takes, "shapes", {
        "None is a tensor": [("        if t is None:\n            continue\n", "")]}),
    (returns_the_sizes, "shapes", {
        "writes into the caller's sizes": [
            ("sizes = dict(known or {})", "sizes = known if known is not None else {}")]}),
    (refuses, "width", {
        "the axis before the last": [("x.shape[-1] != d", "x.shape[-2] != d")],
        "a number has no last axis": [("x.ndim == 0 or ", "")]}),
    (refuses, "dtypes", {
        "dtypes of the first tensor alone": [
            ('got {t.dtype}")\n\n\ndef floating',
             'got {t.dtype}")\n        break\n\n\ndef floating')],
        "the same dtype named twice": [
            ("dict.fromkeys(map(str, allowed))", "map(str, allowed)")]}),
    (takes, "dtypes", {
        "None has no dtype": [("t is not None and t.dtype not in", "t.dtype not in")]}),
    (refuses, "floating", {
        "complex numbers are floats": [
            ("not dtype.is_floating_point",
             "not (dtype.is_floating_point or dtype.is_complex)")]}),
    (takes, "floating", {
        "None is no float": [("dtype is not None and ", "")]}),
    (takes, "entries", {
        "closed below is open": [(BELOW, BELOW.replace("<=", "<"))],
        "closed above is open": [(ABOVE, ABOVE.replace("<=", "<"))],
        "no entry is an entry": [(" and t.numel() and not", " and not")],
        "None has entries": [("t is not None and t.numel()", "t.numel()")]}),
    (refuses, "entries", {
        "open below is closed": [("else low < value", "else low <= value")],
        "open above is closed": [("else value < high", "else value <= high")],
        "NaN is let through": [
            ("return above and below",
             "return not (value < low or value > high) if value != value else above and below")],
        "only the smallest entry": [
            ("_inside(low, interval) and _inside(high, interval)", "_inside(low, interval)")],
        "only the largest entry": [
            ("_inside(low, interval) and _inside(high, interval)", "_inside(high, interval)")],
        "the first tensor alone": [
            (TENSORS, TENSORS.replace("if ", "if name == next(iter(named)) and "))]}),
    (takes, "numbers", {
        "closed below is open, numbers": [(BELOW, BELOW.replace("<=", "<"))],
        "closed above is open, numbers": [(ABOVE, ABOVE.replace("<=", "<"))],
        "a whole number is none": [
            ("if not isinstance(value, Real)", "if not isinstance(value, float)")],
        "only Python's own numbers": [
            ("if not isinstance(value, Real)", "if not isinstance(value, float | int)")]}),
    (refuses, "numbers", {
        "open below is closed, numbers": [("else low < value", "else low <= value")],
        "open above is closed, numbers": [("else value < high", "else value <= high")],
        "NaN is let through, numbers": [
            ("return above and below", "return value != value or (above and below)")],
        "True is a number": [(" or isinstance(value, bool)", "")]}),
    (looks_at_values_at_the_door_alone, "entries", {
        "values in a compiled graph": [(WHILE_COMPILING, "")],
        "one question for each entry": [
            ("(end.item() for end in t.detach().aminmax())",
             "min(ends := [end.item() for end in t.flatten()]), max(ends)")]}),
    (looks_at_values_at_the_door_alone, "token_ids", {
        "ids in a compiled graph": [(WHILE_COMPILING, "")]}),
    (compiles, "all", {
        "values break the graph": [(WHILE_COMPILING, "")]}),
    (looks_at_no_value, "mixer_call", {
        "a mixer looks at its positions": [
            ('    shapes(known, position_ids=(position_ids, "b l"))\n',
             '    shapes(known, position_ids=(position_ids, "b l"))\n'
             '    entries("(-inf, inf)", position_ids=position_ids)\n')]}),
    (takes, "sizes", {
        "one is too few": [("size < 1", "size <= 1")],
        "only Python's own whole numbers": [
            ("not isinstance(size, Integral)", "not isinstance(size, int)")],
        "None is no size": [
            ("size is not None and (not", "(not"),
            ("size is not None and size < 1", "size < 1")]}),
    (refuses, "sizes", {
        "none is enough": [("size < 1", "size < 0")],
        "2.0 is a whole number": [
            ("not isinstance(size, Integral)", "not isinstance(size, Real)")],
        "True is a size": [(" or isinstance(size, bool)", "")]}),
    (refuses, "multiple", {
        "divided the wrong way": [("a % b", "b % a")],
        "a multiple of nothing": [("b < 1 or ", "b and ")],
        "a multiple of what is negative": [("b < 1 or ", "b == 0 or ")]}),
    (takes, "multiple", {
        "one divides nothing": [("b < 1", "b <= 1")]}),
    (takes, "choice", {
        "a tuple is a Literal": [
            ("options if isinstance(options, tuple) else get_args(options)",
             "get_args(options)")]}),
    (refuses, "choice", {
        "None is always a choice": [
            ("if value not in options", "if value is not None and value not in options")],
        "the options are not named": [("', '.join(map(repr, options))", "len(options)")]}),
    (refuses, "padding_mask", {
        "a mask of numbers": [("    dtypes([torch.bool], padding_mask=mask)\n", "")],
        "a mask of any shape": [('    shapes(known, padding_mask=(mask, "b l"))\n', "")]}),
    (refuses, "mixer_call", {
        "any width": [('shapes({"d": d}, x=', "shapes(x=")],
        "positions of any dtype": [("    dtypes(INDICES, position_ids=position_ids)\n", "")],
        "positions that wrap": [
            ("dtypes(INDICES, position_ids=", "dtypes(INTEGERS, position_ids=")],
        "positions of any shape": [
            ('    shapes(known, position_ids=(position_ids, "b l"))\n', "")],
        "the mask is not looked at": [("    padding_mask(known, mask)\n", "")]}),
    (takes, "mixer_call", {
        "int64 alone": [
            ("INDICES = (torch.int64, torch.int32)", "INDICES = (torch.int64,)")]}),
    (refuses, "token_ids", {
        "the vocabulary ends one too late": [
            ('entries(f"[0, {vocab_size})"', 'entries(f"[0, {vocab_size}]"')],
        "ids of any shape": [('        shapes(**{name: (ids, "b l")})\n', "")],
        "ids of any dtype": [("        dtypes(INTEGERS, **{name: ids})\n", "")]}),
])
