"""Tasks: every answer stands in the text, exactly once, where and as often as the law says.

The properties are functions of a module m: planted/ hands them copies with a mistake.
"""

import itertools
import math

import pytest
import torch

from cheems_ref import tasks
from cheems_ref.attention import naive_attention
from cheems_ref.text import text_to_ids


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_as_expected(counts, expected):
    """Pearson's χ² of counts, within five standard deviations of its mean."""
    assert abs(counts.sum() - expected.sum()) < 1e-6
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi2 = ((counts - expected).square() / expected).sum().item()
    degrees = len(counts) - 1
    assert abs(chi2 - degrees) < 5 * math.sqrt(2 * degrees), (chi2, degrees)


def a_seed_decides(m):
    """And nothing is drawn from torch's own generator."""
    state = torch.get_rng_state()
    for draw in (
        lambda seed: m.multi_query_recall(8, 32, 4, 64, generator=seeded(seed)),
        lambda seed: m.needle(8, 100, 0.5, haystack=HAY, generator=seeded(seed)),
        lambda seed: blanks_of(m, 333, seed=seed),
    ):
        for one, again, other in zip(draw(0), draw(0), draw(1), strict=True):
            assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


# --- recall -------------------------------------------------------------------------------------

SHAPES = [(16, 4, 12), (64, 16, 256), (20, 3, 9), (4, 1, 4)]


def each_key_is_asked_once_and_its_value_is_the_target(m, length, n_pairs, vocab_size):
    input_ids, targets = m.multi_query_recall(200, length, n_pairs, vocab_size, generator=seeded())
    told = input_ids[:, : 2 * n_pairs].unflatten(1, (n_pairs, 2)).tolist()
    asked = [{} for _ in told]
    for row, place in (targets != tasks.IGNORED).nonzero().tolist():
        query = input_ids[row, place].item()
        assert place >= 2 * n_pairs and place % 2 == 0 and query not in asked[row]
        asked[row][query] = targets[row, place].item()
    assert asked == [dict(pairs) for pairs in told]
    assert all(len(row) == len({*row.values()}) == n_pairs for row in asked)
    keys, values = (set(column) for column in zip(*itertools.chain(*told), strict=True))
    half = vocab_size // 2
    assert keys == {*range(1, half)} and values == {*range(half, vocab_size)}


def idle_places_say_nothing(m, length, n_pairs, vocab_size):
    """They hold any token that is in none of the row's pairs; zeros where that is asked for."""
    counts, expected = torch.zeros(2, vocab_size, dtype=torch.float64)
    for random_fill in (True, False):
        input_ids, targets = m.multi_query_recall(
            300, length, n_pairs, vocab_size, random_fill=random_fill, generator=seeded()
        )
        for row, idle in zip(input_ids, targets == tasks.IGNORED, strict=True):
            pairs, fill = row[: 2 * n_pairs].tolist(), row[2 * n_pairs :][idle[2 * n_pairs :]]
            if not random_fill:
                assert not fill.any()
                continue
            others = [i for i in range(vocab_size) if i not in pairs]
            assert {*fill.tolist()} <= {*others}
            expected[others] += len(fill) / len(others)
            counts += fill.bincount(minlength=vocab_size)
    if expected.any():
        assert_as_expected(counts, expected)


def gaps_follow_the_law(m, power):
    """P(first key asked at place i, second at j): j is drawn from the law with i left out."""
    rows, n_pairs = 20_000, 2
    input_ids, targets = m.multi_query_recall(
        rows, 16, n_pairs, 12, power=power, random_fill=False, generator=seeded()
    )
    places = []
    for key in (0, 2):  # where the key at this place is asked for
        is_asked = (input_ids == input_ids[:, key : key + 1]) & (targets != tasks.IGNORED)
        places.append((is_asked.int().argmax(1) - 2 * n_pairs) // 2)
    counts = torch.zeros(6, 6, dtype=torch.float64)
    counts.index_put_(tuple(places), torch.ones(rows, dtype=torch.float64), accumulate=True)
    law = torch.arange(1, 7).double() ** (power - 1)
    law /= law.sum()
    both = (law[:, None] * law / (1 - law[:, None])).fill_diagonal_(0)
    assert_as_expected(counts.flatten(), rows * both.flatten())


@pytest.mark.parametrize("shape", SHAPES)
def test_recall(shape):
    each_key_is_asked_once_and_its_value_is_the_target(tasks, *shape)
    idle_places_say_nothing(tasks, *shape)


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_gaps_follow_the_law(power):
    gaps_follow_the_law(tasks, power)


def test_a_seed_decides():
    a_seed_decides(tasks)
    filled, _ = tasks.multi_query_recall(2, 64, 4, 64, generator=seeded(), random_fill=True)
    assert torch.equal(tasks.multi_query_recall(2, 64, 4, 64, generator=seeded())[0], filled)


# --- needle -------------------------------------------------------------------------------------

HAY = text_to_ids("The quick brown fox jumps over the lazy dog; so it was, and so it is. " * 30)
SENTENCE, ASKED = " The code of abcd is 1234. ", " The code of abcd is 123"


def the_sentence_stands_at_its_depth(m, depth):
    for length in (52, 333):
        input_ids, _ = m.needle(20, length, depth, haystack=HAY, generator=seeded())
        room = length - len(SENTENCE) - len(ASKED)
        place = round(depth * room)
        for text in (bytes(row.tolist()).decode() for row in input_ids):
            assert len(text) == length and text.index(" The code of ") == place
            hay = text[:place] + text[place + len(SENTENCE) :]
            assert hay[:room] in bytes(HAY.tolist()).decode()


def the_answer_stands_in_the_text(m):
    """Each digit is read one place on from its logits."""
    input_ids, targets = m.needle(50, 120, 0.3, haystack=HAY, generator=seeded())
    assert (targets[:, :-4] == tasks.IGNORED).all()
    assert torch.equal(targets[:, -4:-1], input_ids[:, -3:])
    answers = [bytes(row.tolist()).decode() for row in targets[:, -4:]]
    for row, answer in zip(input_ids, answers, strict=True):
        text = bytes(row.tolist()).decode()
        start = text.index(" The code of ")
        told, asked = text[start : start + len(SENTENCE)], text[-len(ASKED) :]
        assert told == f" The code of {told[13:17]} is {answer}. " and answer.isdigit()
        assert asked == told[: len(ASKED)] and text.count("The code of") == 2
    assert len(set(answers)) > 45


def test_needle():
    the_answer_stands_in_the_text(tasks)
    for depth in (0, 0.25, 0.99, 1.0):
        the_sentence_stands_at_its_depth(tasks, depth)


# --- blank infilling ----------------------------------------------------------------------------

MASK, START, END = 9001, 9002, 9003


def blanks_of(m, length, share=0.15, mean_span=3.0, seed=0):
    """A text of different ids, 0 to length - 1, with blanks."""
    ids = dict(ids=torch.arange(length), mask_id=MASK, start_id=START, end_id=END)
    return m.blank_infilling(**ids, share=share, mean_span=mean_span, generator=seeded(seed))


def part_a(blanks):
    """How many tokens part A has, by the input alone: up to the first start."""
    return blanks.input_ids.tolist().index(START)


def spans(blanks):
    """What stands in part B, span by span: (ids read, ids to be written, place of the blank)."""
    starts = [*(blanks.input_ids == START).nonzero()[:, 0].tolist(), len(blanks.input_ids)]
    return [
        (
            blanks.input_ids[start + 1 : end].tolist(),
            blanks.targets[start:end].tolist(),
            blanks.position_ids[start].item(),
        )
        for start, end in itertools.pairwise(starts)
    ]


def blanks_filled_are_the_text(m, length):
    """No two blanks touch; positions count part A, and within each span."""
    for seed in range(20):
        blanks = blanks_of(m, length, 0.4, seed=seed)
        n, places = part_a(blanks), []
        text = blanks.input_ids[:n].tolist()
        assert text.count(MASK) == len(spans(blanks)) >= 1
        assert (MASK, MASK) not in itertools.pairwise(text)
        for read, written, place in spans(blanks):
            assert text[place : place + 1] == [MASK]
            text[place] = read
            assert written == [*read, END] and len(read) >= 1
            places += [(place, i) for i in range(1, len(written) + 1)]
        filled = [i for part in text for i in (part if isinstance(part, list) else [part])]
        assert filled == list(range(length))
        assert (blanks.targets[:n] == tasks.IGNORED).all()
        pairs = torch.stack([blanks.position_ids, blanks.block_position_ids], dim=1).tolist()
        assert pairs == [[i, 0] for i in range(n)] + [[*pair] for pair in places]


def the_share_is_reached_and_no_more(m):
    for share, seed in itertools.product((0.01, 0.15, 0.5), range(10)):
        lengths = sorted(len(read) for read, *_ in spans(blanks_of(m, 400, share, seed=seed)))
        assert sum(lengths) >= 400 * share > sum(lengths) - lengths[-1]


def spans_are_poisson(m):
    lengths = []
    for seed in range(20):
        lengths += [len(read) for read, *_ in spans(blanks_of(m, 3000, seed=seed))]
    counts = torch.tensor(lengths).clamp(max=10).bincount(minlength=11).double()
    poisson = torch.tensor([3.0**i / math.factorial(i) for i in range(11)], dtype=torch.float64)
    poisson[0], poisson[10] = 0, math.exp(3) - poisson[:10].sum()
    assert_as_expected(counts, len(lengths) * poisson / poisson.sum())


def every_placement_is_as_likely(m):
    """Two spans of one token in a text of six: 10 ways without a touch, in 2 orders."""
    counts = {}
    for seed in range(2_000):
        read = tuple(tuple(read) for read, *_ in spans(blanks_of(m, 6, 0.3, 1.0, seed=seed)))
        if [len(span) for span in read] == [1, 1]:
            counts[read] = counts.get(read, 0) + 1
    got = torch.tensor(list(counts.values()), dtype=torch.float64)
    assert len(got) == 20
    assert_as_expected(got, got.mean().expand(20))


def part_b_sees_no_later_token(m):
    """With attention under `visible`: what moves when one token does."""
    blanks = blanks_of(m, 40, 0.3)
    n, length = part_a(blanks), len(blanks.input_ids)
    q, k, v = torch.randn(3, 1, length, 1, 8, generator=seeded(), dtype=torch.float64)

    def read(values):
        return naive_attention(q, k, values, allowed=blanks.visible)[0, :, 0]

    for changed in range(length):
        other = v.clone()
        other[:, changed] += 1
        moved = ((read(other) - read(v)).abs() > 1e-9).any(1)
        after = torch.arange(length) >= changed
        assert torch.equal(moved, after if changed >= n else torch.ones(length, dtype=torch.bool))


def test_blanks_filled_are_the_text():
    for length in (1, 2, 3, 40, 333):
        blanks_filled_are_the_text(tasks, length)


@pytest.mark.parametrize(
    "has_property",
    [
        the_share_is_reached_and_no_more,
        spans_are_poisson,
        every_placement_is_as_likely,
        part_b_sees_no_later_token,
    ],
)
def test_blank_infilling(has_property):
    has_property(tasks)
