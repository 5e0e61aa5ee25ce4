"""Mistakes in the tasks that the properties of test_tasks.py must catch."""

from planting import mistakes
from test_tasks import (
    a_seed_decides,
    each_key_is_asked_once_and_its_value_is_the_target,
    gaps_follow_the_law,
    idle_places_say_nothing,
    keys_and_values_are_apart,
    places_in_the_haystack_differ,
    targets_stand_where_their_logits_are,
    the_answer_stands_in_the_text,
    the_sentence_stands_at_its_depth,
    zeros_where_asked_for,
)

from cheems_ref import tasks

ROOMS = (tasks,)

PLACES = "places = 2 * n_pairs + 2 * draw("
TARGETS = "scatter_(1, places, values)"
SKIPPED = "taken - torch.arange(taken.shape[1]), ranks, right=True"
ROOM = "torch.randint(len(haystack) - room + 1, (n_rows,), generator=generator)"

# fmt: off
MISTAKES = mistakes([
    (each_key_is_asked_once_and_its_value_is_the_target, 16, 4, 12, {
        "the value one token late": [(TARGETS, "scatter_(1, places + 1, values)")],
        "the key for the value": [(TARGETS, "scatter_(1, places, keys)")],
        "of another key": [(TARGETS, "scatter_(1, places, values.roll(1, 1))")],
        "queries from the pairs on": [(PLACES, "places = 2 * draw(")],
        "at every place": [
            (PLACES, "places = 2 * n_pairs + draw("),
            ("(length - 2 * n_pairs) // 2 + 1", "length - 2 * n_pairs + 1")],
        "values first": [("[keys, values], dim=2", "[values, keys], dim=2")]}),
    (keys_and_values_are_apart, 16, 2, 12, {
        "0 for a key": [("keys = 1 + draw(torch.ones(half - 1)", "keys = draw(torch.ones(half)")],
        "keys among the values": [("torch.ones(half - 1)", "torch.ones(half)")],
        "the last value left out": [("vocab_size - half)", "vocab_size - half - 1)")],
        "a key twice": [
            ("generator=generator)\n\n    keys",
             "replacement=True, generator=generator)\n\n    keys")]}),
    (idle_places_say_nothing, 16, 2, 12, {
        "any token": [
            ("return ranks + skipped",
             "return torch.randint(vocab_size, size, generator=generator)")],
        "keys alone left out": [("torch.cat([keys, values], 1)", "keys")],
        "one beside": [(SKIPPED, SKIPPED.replace("True", "False"))],
        "ranks from the whole": [(SKIPPED, "taken, ranks, right=True")],
        "the last never": [("vocab_size - taken.shape[1], size", "vocab_size - 5, size")]}),
    (zeros_where_asked_for, {
        "filled all the same": [("if random_fill:", "if True:")]}),
    (gaps_follow_the_law, 0.01, {
        "even": [("free ** (power - 1)", "free ** 0")],
        "the exponent of the sum": [("free ** (power - 1)", "free ** power")],
        "from 2 on": [("free = torch.arange(1, (length - 2 * n_pairs) // 2 + 1",
                       "free = torch.arange(2, (length - 2 * n_pairs) // 2 + 2")],
        "in order of place": [
            ("draw(free ** (power - 1), n_pairs)",
             "draw(free ** (power - 1), n_pairs).sort(1).values")]}),
    (a_seed_decides, {
        "fill by torch's own": [("size, generator=generator)", "size)")],
        "pairs by torch's own": [
            ("count, generator=generator)\n", "count)\n")],
        "names by torch's own": [("(NAME,), generator=generator", "(NAME,)")],
        "codes by torch's own": [("(CODE,), generator=generator", "(CODE,)")],
        "places by torch's own": [(ROOM, ROOM.replace(", generator=generator", ""))]}),
    (the_sentence_stands_at_its_depth, 0.25, {
        "depth from the end": [("round(depth * room)", "round((1 - depth) * room)")],
        "of the whole text": [("round(depth * room)", "round(depth * length)")],
        "cut off": [("round(depth * room)", "int(depth * room)")],
        "hay left out": [("hay[before:], question", "hay[before + 1:], question, hay[:1]")]}),
    (the_answer_stands_in_the_text, {
        "another code asked": [
            ('"".join(map(str, digits.tolist()))', '"".join(map(str, digits.tolist())))\n'
             '        asked = dict(told, code="0000"'),
            ("question = (text_to_ids(text.format(**told)) for text in (NEEDLE, QUESTION))",
             "question = (text_to_ids(text.format(**which)) for text, which in "
             "((NEEDLE, told), (QUESTION, asked)))")],
        "always the same code": [
            ("digits = torch.randint(10, (CODE,), generator=generator)",
             "digits = torch.full((CODE,), 7)")]}),
    (targets_stand_where_their_logits_are, {
        "a byte late": [("text[:, -CODE:]\n", "text[:, -CODE - 1 : -1]\n")],
        "the answer is read": [("return text[:, :-1], targets", "return text[:, 1:], targets")],
        "three digits": [
            ("targets[:, -CODE:] = text[:, -CODE:]",
             "targets[:, -CODE + 1 :] = text[:, -CODE + 1 :]")]}),
    (places_in_the_haystack_differ, {
        "always the beginning": [(ROOM, "torch.zeros(n_rows, dtype=torch.int64)")],
        "one byte too far": [("len(haystack) - room + 1,", "max(1, len(haystack) - room),"),
                             ("hay = haystack[start :", "hay = haystack[start + 1 :")]}),
], tasks)
# fmt: on
