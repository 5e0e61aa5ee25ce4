"""Mistakes in the tasks that the properties of test_tasks.py must catch."""

from planting import mistakes
from test_tasks import (
    a_seed_decides,
    blanks_come_from_a_seed,
    blanks_do_not_touch,
    blanks_filled_are_the_text,
    each_key_is_asked_once_and_its_value_is_the_target,
    every_placement_is_as_likely,
    gaps_follow_the_law,
    idle_places_say_nothing,
    keys_and_values_are_apart,
    part_b_sees_no_later_token,
    places_in_the_haystack_differ,
    positions_are_of_two_kinds,
    spans_are_poisson,
    targets_stand_where_their_logits_are,
    the_answer_stands_in_the_text,
    the_sentence_stands_at_its_depth,
    the_share_is_reached_and_no_more,
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
    (blanks_filled_are_the_text, 40, {
        "a token lost": [("part_a += [ids[end:start]", "part_a += [ids[end : start - 1]")],
        "no blank at all": [("ids[end:start], mask]", "ids[end:start]]")],
        "the end left out": [("torch.cat([*part_a, ids[end:]])", "torch.cat(part_a)")],
        "the answer is read": [
            ("input_ids.append(torch.cat([first, spans[i]]))",
             "input_ids.append(torch.cat([spans[i], first]))")],
        "nothing ends a span": [
            ("torch.cat([spans[i], last])", "torch.cat([spans[i], first])")],
        "part A asked for": [("torch.full_like(part_a, IGNORED)", "part_a.clone()")],
        "blanks of their neighbours": [("targets[-1], blanks[i])", "targets[-1], blanks[i - 1])")],
        "positions of the whole text": [
            ("torch.full_like(targets[-1], blanks[i])", "torch.full_like(targets[-1], starts[i])")],
        "empty spans": [("if drawn else []", "if True else []")]}),
    (positions_are_of_two_kinds, 40, {
        "positions that go on": [
            ("torch.full_like(targets[-1], blanks[i])",
             "blanks[i] + torch.arange(len(targets[-1]))")],
        "block positions from 0": [
            ("torch.arange(1, len(targets[-1]) + 1)", "torch.arange(len(targets[-1]))")]}),
    (blanks_do_not_touch, 333, {
        "twice the same gap": [
            ("torch.randperm(kept + 1, generator=generator)[: len(lengths)]",
             "torch.randint(kept + 1, (len(lengths),), generator=generator)")]}),
    (the_share_is_reached_and_no_more, {
        "one span too many": [("< share * length:", "<= share * length + 3:")],
        "one span too few": [("return lengths\n", "return lengths[:-1] or lengths\n")]}),
    (spans_are_poisson, {
        "zeros made ones": [("[min(drawn, room)] if drawn else []", "[max(1, min(drawn, room))]")],
        "a mean of 4": [("torch.tensor(float(mean_span))", "torch.tensor(float(mean_span) + 1)")],
        "all of the mean": [("min(drawn, room)", "min(3, room)")]}),
    (every_placement_is_as_likely, {
        "never at the end": [
            ("torch.randperm(kept + 1,", "torch.randperm(max(kept, len(lengths)),")],
        "in the order of the text": [
            ("for i in torch.randperm(len(spans), generator=generator).tolist():",
             "for i in range(len(spans)):")]}),
    (part_b_sees_no_later_token, {
        "everyone sees everyone": [("(place <= place[:, None]) | (place < len(part_a))",
                                    "place[:, None] + place >= 0")],
        "part A sees what is before": [("| (place < len(part_a))", "")],
        "not itself": [("(place <= place[:, None])", "(place < place[:, None])")],
        "one token ahead": [("(place <= place[:, None])", "(place <= place[:, None] + 1)")],
        "transposed": [("(place <= place[:, None])", "(place >= place[:, None])")]}),
    (blanks_come_from_a_seed, {
        "lengths by torch's own": [("torch.tensor(float(mean_span)), generator=generator)",
                                    "torch.tensor(float(mean_span)))")],
        "gaps by torch's own": [("kept + 1, generator=generator)", "kept + 1)")],
        "order by torch's own": [("len(spans), generator=generator)", "len(spans))")]}),
], tasks)
# fmt: on
