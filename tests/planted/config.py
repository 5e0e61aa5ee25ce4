"""Mistakes that the properties of test_config.py must catch."""

from models import ROOMS as ROOMS
from planting import mistakes
from test_config import (
    HELD as HELD,
)
from test_config import (
    a_config_is_a_value,
    bad_numbers_are_refused,
    bad_patterns_are_refused,
    one_of_everything_is_enough,
    patterns_are_spelled_out,
    presets_are_those_of_otce,
    presets_are_those_of_wm,
    presets_have_the_size_in_their_name,
    published_models_have_their_published_size,
)

from cheems_ref import check, config, presets

UNCHECKED = True  # the type checker would answer first

APPEND = "open_groups[-1].append(word)"
REPEAT = "open_groups[-1][-1] *= int(times)"
NO_NUMBER = "size is not None and (not isinstance(size, Integral) or isinstance(size, bool))"
FOR_LETTER = "for letter in dict.fromkeys(self.pattern):"

# fmt: off
PLANTED = [
    (patterns_are_spelled_out, {
        "× binds one letter": [(APPEND, "open_groups[-1].extend(word)")],
        "× binds all before it": [
            (REPEAT, 'open_groups[-1] = ["".join(open_groups[-1]) * int(times)]')],
        "× counts further copies": [(REPEAT, "open_groups[-1][-1] *= int(times) + 1")],
        "× takes one digit": [(r"\s*(\d+)|", r"\s*(\d)|")],
        "× 1 takes away": [(REPEAT, "open_groups[-1][-1] *= int(times) - (times == '1')")],
        "no spaces before a number": [(r"[×x*]\s*(", "[×x*](")],
        "x is no ×": [("[×x*]", "[×*]")],
        "* is no ×": [("[×x*]", "[×x]")],
        "a bracket binds its last word": [
            ('open_groups[-1].append("".join(group))', "open_groups[-1].extend(group)")],
        "a bracket is flat": [
            ("open_groups.append([])", "pass"),
            ("if len(open_groups) == 1:", "if False:"),
            ("group = open_groups.pop()", "group = []")]}),
    (bad_patterns_are_refused, {
        "times 0": [(" or int(times) == 0:", ":")],
        "an open bracket": [("if len(open_groups) > 1:", "if False:")],
        "an open bracket inside": [("if len(open_groups) > 1:", "if len(open_groups) == 2:")],
        "any sign": [("elif other:", "elif False:")],
        "a number that is missing is a sign": [('elif other and other in "×x*":', "elif False:")],
        "any number of times": [("* int(times)) > MAX_LAYERS:", "* int(times)) > 10**7:")],
        "any number of layers": [("if len(letters) > MAX_LAYERS:", "if False:")],
        "places count from 0": [("place {part.start() + 1} of", "place {part.start()} of")],
        "the place of the word": [
            ("place {part.start() + i + 1} of", "place {part.start() + 1} of")],
        "nothing at all": [
            ('if not (letters := "".join(open_groups[0])):',
             'if (letters := "".join(open_groups[0])) is None:')]}),
    (bad_numbers_are_refused, {
        "nothing for a size": [("if value is None and field.type is int:", "if False:")],
        "sizes of any length": [("if value is not None and value >= 2**31:", "if False:")],
        "patterns of numbers": [("if not isinstance(pattern, str):", "if False:")],
        "optional sizes unseen": [("if field.type in (int, int | None):", "if field.type is int:")],
        "any eps": [('check.numbers("(0, 1)", norm_eps', 'check.numbers("(0, inf)", norm_eps')],
        "any base": [('"(0, inf)", rope_base', '"(-inf, inf)", rope_base')],
        "nothing that mixes": [("if not set(self.pattern) & set(SEQUENCE_MIXERS):", "if False:")],
        "only the first letter": [(FOR_LETTER, "for letter in self.pattern[0]:")],
        "another letter named": [('f"letter {letter} (', 'f"letter {self.pattern[0]} (')],
        "no letter named": [('f"letter {letter} ({LAYERS[letter].name}): {error}"', "str(error)")],
        "names of the layer": [
            ('        check.numbers(f"[1, {n}]", k_neurons=c.k_neurons)\n', "")]}),
    (a_config_is_a_value, {
        "not frozen": [("@dataclass(frozen=True)", "@dataclass(unsafe_hash=True)")],
        "pattern as written": [
            ('object.__setattr__(self, "pattern", expand_pattern(self.pattern))',
             "expand_pattern(self.pattern)"),
            (FOR_LETTER, "for letter in dict.fromkeys(expand_pattern(self.pattern)):")]}),
]
PLANTED_CHECKS = [
    (bad_numbers_are_refused, {
        "true is 1": [(NO_NUMBER, "size is not None and not isinstance(size, Integral)")],
        "halves": [(NO_NUMBER, "isinstance(size, (bool, str, list))")],
        "zero": [("if size is not None and size < 1:", "if size is not None and size < 0:")]}),
    (one_of_everything_is_enough, {
        "one is too few": [("size is not None and size < 1:", "size is not None and size <= 1:")]}),
]
PLANTED_PRESETS = [
    (presets_are_those_of_wm, {
        "five experts": [("k_experts=1)\n_WM_1B", "k_experts=1, n_experts=5)\n_WM_1B")],
        "the square below": [
            ("d_ff=2992, n_values=6, n_neurons=3136", "d_ff=2992, n_values=6, n_neurons=3025")],
        "attention first": [("(SH SH SH SH AH SH SH SH) × 3", "(AH SH SH SH SH SH SH SH) × 3")],
        "23 layers": [('"SH × 24"', '"SH × 23"')],
        "chunks of 64": [
            ("n_heads=32, d_state=128, chunk_size=256", "n_heads=32, d_state=128, chunk_size=64")],
        "Mamba-2 by rope": [
            ('pattern=_MAMBA2, d_ff=896, position="conv"', "pattern=_MAMBA2, d_ff=896")],
        "twelve heads at 1.3b": [("d_model=2048, n_heads=32", "d_model=2048, n_heads=16")]}),
    (presets_are_those_of_otce, {
        "ends in S": [('"SD SD SD SD AD SD SD AD"', '"SD SD SD SD AD SD SD SD"')],
        "eleven and nine": [
            ("SD + SH × 11 + AH × 2 + SH × 8 +", "SD + SH × 10 + AH × 2 + SH × 9 +")],
        "shared for cohesive": [
            ("SD + SC × 11 + AC × 2 + SC × 8", "SD + SH × 11 + AH × 2 + SH × 8")],
        "two of four": [("d_ff=2304, k_experts=1\n", "d_ff=2304\n")],
        "eight groups": [
            ("_OTCE_1B = dict(_OTCE, n_kv_heads=2", "_OTCE_1B = dict(_OTCE, n_kv_heads=8")]}),
    (presets_have_the_size_in_their_name, {
        "16 too wide": [("pattern=_LLAMA, d_ff=816", "pattern=_LLAMA, d_ff=832")],
        "16 too narrow": [("d_ff=992, n_values=16", "d_ff=976, n_values=16")],
        "a narrower Doge": [("_DOGE,\n        d_ff=6704", "_DOGE,\n        d_ff=6000")],
        "a wider cohesive model": [("d_ff=4192", "d_ff=4320")]}),
    (published_models_have_their_published_size, {
        "tied": [("n_heads=32, tie_embeddings=False)", "n_heads=32)")],
        "a key for every head": [
            ("vocab_size=32000, d_ff=14336, n_kv_heads=8)", "vocab_size=32000, d_ff=14336)")],
        "not gated": [
            ('"AG × 32", vocab_size=32000, d_ff=11008', '"AM × 32", vocab_size=32000, d_ff=11008')],
        "an expert for all": [('pattern="AR × 32"', 'pattern="AH × 32"')],
        "one of eight": [
            ("n_kv_heads=8, n_experts=8\n", "n_kv_heads=8, n_experts=8, k_experts=1\n")]}),
]
# fmt: on

MISTAKES = [
    *mistakes(PLANTED, config),
    *mistakes(PLANTED_CHECKS, check),
    *mistakes(PLANTED_PRESETS, presets),
]
