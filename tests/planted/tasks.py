"""Mistakes in the tasks that the properties of test_tasks.py must catch."""

import test_tasks as tests
from planting import mistakes

from cheems_ref import tasks

ROOMS = (tasks,)

TARGETS = "IGNORED).scatter_(1, places, values)"

# fmt: off
MISTAKES = mistakes([
    (tests.each_key_is_asked_once_and_its_value_is_the_target, 16, 4, 12, {
        "the value one token late": [(TARGETS, TARGETS.replace("places", "places + 1"))]}),
    (tests.idle_places_say_nothing, 16, 4, 12, {
        "any token as filler": [
            ("return ranks + skipped",
             "return torch.randint(vocab_size, ranks.shape, generator=generator)")]}),
    (tests.gaps_follow_the_law, 0.01, {
        "the exponent of the sum": [("free ** (power - 1)", "free ** power")],
        "in order of place": [
            ("draw(free ** (power - 1), n_pairs)",
             "draw(free ** (power - 1), n_pairs).sort(1).values")]}),
    (tests.the_sentence_stands_at_its_depth, 0.25, {
        "depth from the end": [("round(depth * room)", "round((1 - depth) * room)")]}),
    (tests.the_answer_stands_in_the_text, {
        "the answer is read": [("return text[:, :-1], targets", "return text[:, 1:], targets")]}),
    (tests.blanks_filled_are_the_text, 333, {
        "the answer is read": [
            ("input_ids.append(torch.cat([first, spans[i]]))",
             "input_ids.append(torch.cat([spans[i], first]))")],
        "targets in part A": [
            ("[part_a], [torch.full_like(part_a, IGNORED)]", "[part_a], [part_a.clone()]")],
        "positions that go on": [
            ("torch.full_like(targets[-1], blanks[i])",
             "blanks[i] + torch.arange(len(targets[-1]))")],
        "twice the same gap": [
            ("torch.randperm(kept + 1, generator=generator)[: len(lengths)]",
             "torch.randint(kept + 1, (len(lengths),), generator=generator)")]}),
    (tests.spans_are_poisson, {
        "zeros made ones": [
            ("[min(drawn, room)] if drawn else []", "[max(1, min(drawn, room))]")]}),
    (tests.every_placement_is_as_likely, {
        "spans in the order of the text": [
            ("for i in torch.randperm(len(spans), generator=generator).tolist():",
             "for i in range(len(spans)):")]}),
    (tests.part_b_sees_no_later_token, {
        "a causal mask": [("| (place < len(part_a))", "")]}),
])
# fmt: on
HELD = {mistake.asked() for mistake in MISTAKES}  # test_tasks.py asks all of them
