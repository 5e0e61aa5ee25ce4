"""Mistakes in the documents of an evaluation that test_documents.py must catch."""

from planting import mistakes
from test_documents import (
    PROPERTIES,
    a_seed_decides_everything,
    needles_stand_at_every_depth,
    no_place_is_favoured,
    other_choices_are_from_elsewhere,
    passages_hold_words,
    recall_asks_every_query_once,
    the_answer_goes_on_where_the_passage_stops,
    what_cannot_be_asked_is_refused,
)

from cheems_ref import documents

ROOMS = (documents,)
UNCHECKED = True
HELD = [has_property.__name__ for has_property in PROPERTIES]
APART = "apart = other + after <= place - before or other >= place + after"

# fmt: off
MISTAKES = mistakes([
    (the_answer_goes_on_where_the_passage_stops, {
        "a byte is skipped": [('"passage": _whole_letters(data[place - before : place])',
                               '"passage": _whole_letters(data[place - before : place - 1])')],
        "the answer is another": [("order.index(0)", "order.index(1)")],
        "the order back to front": [("order.index(0)", "order[0]")],
        "from inside a letter": [("data) - after + 1) if _begins_a_letter(data[i])]",
                                  "data) - after + 1)]")]}),
    (other_choices_are_from_elsewhere, {
        "from anywhere": [(APART, "apart = True")],
        "from the passage too": [(APART, "apart = abs(other - place) >= after")],
        "twice": [("found += {_whole_letters(data[other : other + after])} - {*found}",
                   "found += [_whole_letters(data[other : other + after])]")]}),
    (passages_hold_words, {
        "or none": [("place]).strip():", "place]):")],
        "from here on": [("items[(start + i) % len(items)] for i in range(len(items))",
                          "items[i] for i in range(start, len(items))")]}),
    (no_place_is_favoured, {
        "the answer first": [("order = torch.randperm(CHOICES, generator=generator).tolist()",
                              "order = [*range(CHOICES)]")],
        "from the beginning": [("torch.randint(len(places), (", "torch.randint(300, (")]}),
    (recall_asks_every_query_once, {
        "without the key": [("letters[: place + 1]", "letters[:place]")],
        "the keys": [('"choices": list(values)', '"choices": list(keys)')],
        "the last": [("letters[place])", "letters[-1]) if letters[-1] in keys else 0")],
        "not at the first place": [("targets >= 0", "targets > targets.min() + 150")],
        "from a space on": [('FIRST = "!"', 'FIRST = " "')],
        "an odd length": [("length // 2 * 2", "(length + 1) // 2 * 2")]}),
    (needles_stand_at_every_depth, {
        "at two": [("(0.0, 0.25, 0.5, 0.75, 1.0)", "(0.0, 1.0)")],
        "always in front": [("needle(n_rows, length, depth", "needle(n_rows, length, 0.0")],
        "with its code": [("ids[: 1 - CODE]", "ids")],
        "a digit is told": [("ids[: 1 - CODE]", "ids[: 2 - CODE]")]}),
    (a_seed_decides_everything, {
        "cloze has none": [("torch.randperm(len(data) - after + 1, generator=generator)",
                            "torch.randperm(len(data) - after + 1)")],
        "always one": [("generator = torch.Generator().manual_seed(seed)\n    rows",
                        "generator = torch.Generator().manual_seed(0)\n    rows")],
        "needles have none": [("torch.Generator().manual_seed(seed), text",
                               "torch.Generator().seed() and None, text")]}),
    (what_cannot_be_asked_is_refused, {
        "no passage is one": [("if before < 1:", "if before < 0:")],
        "any letter": [("if vocab_size > LETTERS:", "if False:")]}),
])
# fmt: on
