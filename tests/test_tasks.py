"""Tasks: every answer stands in the text, exactly once, where and as often as the law says."""

import math

import pytest
import torch
import torch.nn.functional as F

from cheems_ref import tasks
from cheems_ref.attention import naive_attention
from cheems_ref.text import text_to_ids


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# --- recall -------------------------------------------------------------------------------------

SHAPES = [(16, 2, 12), (16, 4, 12), (64, 16, 256), (20, 3, 9), (4, 1, 4)]


def answered(input_ids, targets, n_pairs):
    """(row, place of the query, query, answer) for every target, and each row's pairs."""
    places = (targets != tasks.IGNORED).nonzero().tolist()
    told = input_ids[:, : 2 * n_pairs].unflatten(1, (n_pairs, 2)).tolist()
    return [(i, j, input_ids[i, j].item(), targets[i, j].item()) for i, j in places], told


def each_key_is_asked_once_and_its_value_is_the_target(m, length, n_pairs, vocab_size):
    for random_fill in (True, False):
        draw = m.multi_query_recall(
            50, length, n_pairs, vocab_size, random_fill=random_fill, generator=seeded()
        )
        queries, told = answered(*draw, n_pairs)
        asked = [{} for _ in told]
        for row, place, query, answer in queries:
            assert place >= 2 * n_pairs and place % 2 == 0
            assert query not in asked[row]
            asked[row][query] = answer
        assert asked == [dict(pairs) for pairs in told]


def keys_and_values_are_apart(m, length, n_pairs, vocab_size):
    input_ids, _ = m.multi_query_recall(200, length, n_pairs, vocab_size, generator=seeded())
    keys, values = input_ids[:, : 2 * n_pairs].unflatten(1, (n_pairs, 2)).unbind(2)
    half = vocab_size // 2
    assert set(keys.unique().tolist()) == set(range(1, half))
    assert set(values.unique().tolist()) == set(range(half, vocab_size))
    for one in (keys, values):
        assert all(len(set(row)) == n_pairs for row in one.tolist())


def idle_places(input_ids, targets, n_pairs):
    """For every row the tokens at places that hold neither a pair nor a query."""
    idle = targets == tasks.IGNORED
    idle[:, : 2 * n_pairs] = False
    return [row[where].tolist() for row, where in zip(input_ids, idle, strict=True)]


def idle_places_say_nothing(m, length, n_pairs, vocab_size):
    input_ids, targets = m.multi_query_recall(300, length, n_pairs, vocab_size, generator=seeded())
    fill = idle_places(input_ids, targets, n_pairs)
    counts = torch.zeros(vocab_size, dtype=torch.float64)
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    for tokens, pairs in zip(fill, input_ids[:, : 2 * n_pairs].tolist(), strict=True):
        assert not set(tokens) & set(pairs)
        others = [i for i in range(vocab_size) if i not in pairs]
        expected[others] += len(tokens) / len(others)
        counts += torch.tensor(tokens, dtype=torch.int64).bincount(minlength=vocab_size)
    if fill[0]:
        assert_as_expected(counts, expected)


def assert_as_expected(counts, expected):
    """Pearson's χ² of counts, within five standard deviations of its mean."""
    assert abs(counts.sum() - expected.sum()) < 1e-6
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi2 = ((counts - expected).square() / expected).sum().item()
    degrees = len(counts) - 1
    assert abs(chi2 - degrees) < 5 * math.sqrt(2 * degrees), (chi2, degrees)


def zeros_where_asked_for(m):
    draw = m.multi_query_recall(50, 32, 4, 20, random_fill=False, generator=seeded())
    assert {token for row in idle_places(*draw, 4) for token in row} == {0}


def place_pairs(space, power):
    """P(first key asked at place i, second at place j), by the definition: j is drawn from the law
    with i left out."""
    law = [j ** (power - 1) for j in range(1, space + 1)]
    total, P = sum(law), torch.zeros(space, space, dtype=torch.float64)
    for i in range(space):
        for j in range(space):
            if i != j:
                P[i, j] = law[i] / total * law[j] / (total - law[i])
    return P


def gaps_follow_the_law(m, power):
    rows, n_pairs, length = 20_000, 2, 16
    input_ids, targets = m.multi_query_recall(
        rows, length, n_pairs, 12, power=power, random_fill=False, generator=seeded()
    )
    places = []
    for key in (0, 2):  # where the key at this place is asked for
        is_asked = (input_ids == input_ids[:, key : key + 1]) & (targets != tasks.IGNORED)
        places.append((is_asked.int().argmax(1) - 2 * n_pairs) // 2)
    counts = torch.zeros(6, 6, dtype=torch.float64)
    counts.index_put_(tuple(places), torch.ones(rows, dtype=torch.float64), accumulate=True)
    assert_as_expected(counts.flatten(), rows * place_pairs(6, power).flatten())


def a_seed_decides(m):
    draw = lambda seed: m.multi_query_recall(8, 32, 4, 64, generator=seeded(seed))  # noqa: E731
    for one, again, other in zip(draw(0), draw(0), draw(1), strict=True):
        assert torch.equal(one, again) and not torch.equal(one, other)
    state = torch.get_rng_state()
    m.multi_query_recall(8, 32, 4, 64, generator=seeded())
    m.needle(2, 100, 0.5, haystack=HAY, generator=seeded())
    assert torch.equal(torch.get_rng_state(), state)
    draw = lambda seed: m.needle(8, 100, 0.5, haystack=HAY, generator=seeded(seed))  # noqa: E731
    for one, again, other in zip(draw(0), draw(0), draw(1), strict=True):
        assert torch.equal(one, again) and not torch.equal(one, other)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "has_property",
    [
        each_key_is_asked_once_and_its_value_is_the_target,
        keys_and_values_are_apart,
        idle_places_say_nothing,
    ],
)
def test_recall(has_property, shape):
    has_property(tasks, *shape)


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_follow_the_law(power):
    gaps_follow_the_law(tasks, power)


def test_zeros_where_asked_for():
    zeros_where_asked_for(tasks)


def test_a_seed_decides():
    a_seed_decides(tasks)


def test_a_reader_who_looks_keys_up_is_right_everywhere():
    """The loss as the docstring has it, of logits that a search through the text makes."""
    input_ids, targets = tasks.multi_query_recall(20, 64, 16, 256, generator=seeded())
    logits = torch.zeros(*input_ids.shape, 256)
    for row, ids in enumerate(input_ids.tolist()):
        value = dict(zip(ids[:32:2], ids[1:32:2], strict=True))
        for place, token in enumerate(ids):
            logits[row, place, value.get(token, 0)] = 50.0
    assert F.cross_entropy(logits.flatten(0, 1), targets.flatten()) < 1e-6
    earlier = F.cross_entropy(logits.flatten(0, 1), targets.roll(1, 1).flatten())
    assert earlier > 1  # were the targets a token late, no search would find them


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(length=15), "length must be even, got 15"),
        (dict(length=14), "length = 14 has no room for n_pairs = 4"),
        (dict(vocab_size=8), "vocab_size = 8 is too small for n_pairs = 4"),
        (dict(vocab_size=9), "vocab_size = 9 is too small for n_pairs = 4"),
        (dict(power=0.0), r"power must be a number in \(0, 1\], got 0.0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_recall_refuses(arguments, message):
    right = dict(n_rows=2, length=16, n_pairs=4, vocab_size=12)
    tasks.multi_query_recall(**right)
    with pytest.raises(ValueError, match=message):
        tasks.multi_query_recall(**right | arguments)


# --- needle -------------------------------------------------------------------------------------

HAY = text_to_ids("The quick brown fox jumps over the lazy dog; so it was, and so it is. " * 30)
SENTENCE, ASKED = " The code of abcd is 1234. ", " The code of abcd is 123"


def texts(input_ids, targets):
    """Every row as its text and what is asked of it."""
    return [
        (bytes(row.tolist()).decode(), bytes(t[t != tasks.IGNORED].tolist()).decode())
        for row, t in zip(input_ids, targets, strict=True)
    ]


def the_sentence_stands_at_its_depth(m, depth):
    for length in (52, 102, 333):
        room = length - len(SENTENCE) - len(ASKED)
        for text, _ in texts(*m.needle(20, length, depth, haystack=HAY, generator=seeded())):
            assert len(text) == length
            assert text.index(" The code of ") == round(depth * room)
            hay = text[: round(depth * room)] + text[round(depth * room) + len(SENTENCE) :]
            assert hay[:room] in bytes(HAY.tolist()).decode()


def the_answer_stands_in_the_text(m):
    drawn = m.needle(50, 120, 0.3, haystack=HAY, generator=seeded())
    codes = set()
    for text, answer in texts(*drawn):
        start = text.index(" The code of ")
        told, asked = text[start : start + len(SENTENCE)], text[-len(ASKED) :]
        assert told == f" The code of {told[13:17]} is {answer}. " and answer.isdigit()
        assert asked == told[: len(ASKED)] and text.count("The code of") == 2
        codes.add(answer)
    assert len(codes) > 45


def targets_stand_where_their_logits_are(m):
    input_ids, targets = m.needle(5, 120, 0.3, haystack=HAY, generator=seeded())
    assert (targets[:, :-4] == tasks.IGNORED).all()
    assert torch.equal(targets[:, -4:-1], input_ids[:, -3:])  # each digit is read one place on
    assert (input_ids[:, -4] == ord(" ")).all()


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.99, 1.0])
def test_the_sentence_stands_at_its_depth(depth):
    the_sentence_stands_at_its_depth(tasks, depth)


@pytest.mark.parametrize(
    "has_property",
    [
        the_answer_stands_in_the_text,
        targets_stand_where_their_logits_are,
    ],
)
def test_needle(has_property):
    has_property(tasks)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(length=50), "length = 50 has no room for sentence and question: 1 short"),
        (dict(depth=1.5), r"depth must be a number in \[0, 1\], got 1.5"),
        (dict(haystack=HAY[:10]), "the haystack has 10 bytes, fewer than the 49 of a text"),
        (dict(haystack=HAY + 200), r"haystack must be in \[0, 256\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_needle_refuses(arguments, message):
    right = dict(n_rows=2, length=100, depth=0.5, haystack=HAY)
    tasks.needle(**right)
    with pytest.raises(ValueError, match=message):
        tasks.needle(**right | arguments)


# --- blank infilling ----------------------------------------------------------------------------

MASK, START, END = SPECIAL = 9001, 9002, 9003
LENGTHS_OF_TEXTS = [1, 2, 3, 7, 40, 333]


def blanks_of(m, length, share=0.15, mean_span=3.0, seed=0):
    """A text of different ids, 0 to length - 1, with blanks."""
    named = dict(zip(("mask_id", "start_id", "end_id"), SPECIAL, strict=True))
    return m.blank_infilling(
        torch.arange(length), **named, share=share, mean_span=mean_span, generator=seeded(seed)
    )


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
        for start, end in zip(starts, starts[1:])  # noqa: B905, RUF007
    ]


def blanks_filled_are_the_text(m, length):
    for seed in range(20):
        blanks = blanks_of(m, length, 0.3, seed=seed)
        text = blanks.input_ids[: part_a(blanks)].tolist()
        assert text.count(MASK) == len(spans(blanks)) >= 1
        for read, written, place in spans(blanks):
            assert text[place : place + 1] == [MASK]
            text[place] = read
            assert written == [*read, END] and len(read) >= 1
        filled = [i for part in text for i in (part if isinstance(part, list) else [part])]
        assert filled == list(range(length))
        assert (blanks.targets[: part_a(blanks)] == tasks.IGNORED).all()


def positions_are_of_two_kinds(m, length):
    for seed in range(20):
        blanks = blanks_of(m, length, 0.3, seed=seed)
        n = part_a(blanks)
        assert blanks.position_ids[:n].tolist() == list(range(n))
        assert not blanks.block_position_ids[:n].any()
        expected = [(place, i + 1) for _, ids, place in spans(blanks) for i in range(len(ids))]
        pairs = zip(blanks.position_ids[n:], blanks.block_position_ids[n:], strict=True)
        assert [(a.item(), b.item()) for a, b in pairs] == expected


def blanks_do_not_touch(m, length):
    for seed in range(50):
        blanks = blanks_of(m, length, 0.45, seed=seed)
        text = blanks.input_ids[: part_a(blanks)].tolist()
        assert (MASK, MASK) not in zip(text, text[1:])  # noqa: B905, RUF007


def the_share_is_reached_and_no_more(m):
    for share in (0.01, 0.15, 0.5):
        for seed in range(30):
            lengths = sorted(len(read) for read, *_ in spans(blanks_of(m, 400, share, seed=seed)))
            assert sum(lengths) >= 400 * share > sum(lengths) - lengths[-1]


def spans_are_poisson(m):
    lengths = []
    for seed in range(40):
        lengths += [len(read) for read, *_ in spans(blanks_of(m, 3000, seed=seed))]
    counts = torch.tensor(lengths).clamp(max=10).bincount(minlength=11).double()
    poisson = torch.tensor([3.0**i / math.factorial(i) for i in range(11)], dtype=torch.float64)
    poisson[0], poisson[10] = 0, math.exp(3) - poisson[:10].sum()
    assert_as_expected(counts, len(lengths) * poisson / poisson.sum())


def every_placement_is_as_likely(m):
    """Two spans of one token in a text of six: 10 ways without a touch, in 2 orders."""
    counts = {}
    for seed in range(3_000):
        read = tuple(tuple(read) for read, *_ in spans(blanks_of(m, 6, 0.3, 1.0, seed=seed)))
        if [len(span) for span in read] == [1, 1]:
            counts[read] = counts.get(read, 0) + 1
    assert len(counts) == 20
    got = torch.tensor(list(counts.values()), dtype=torch.float64)
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


def blanks_come_from_a_seed(m):
    for one, again, other in zip(
        *(blanks_of(m, 333, seed=seed) for seed in (0, 0, 1)), strict=True
    ):
        assert torch.equal(one, again) and not torch.equal(one, other)
    state = torch.get_rng_state()
    blanks_of(m, 333)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("length", LENGTHS_OF_TEXTS)
@pytest.mark.parametrize(
    "has_property", [blanks_filled_are_the_text, positions_are_of_two_kinds, blanks_do_not_touch]
)
def test_blanks(has_property, length):
    has_property(tasks, length)


@pytest.mark.parametrize(
    "has_property",
    [
        the_share_is_reached_and_no_more,
        spans_are_poisson,
        every_placement_is_as_likely,
        part_b_sees_no_later_token,
        blanks_come_from_a_seed,
    ],
)
def test_blank_infilling(has_property):
    has_property(tasks)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(ids=torch.arange(0)), "ids is an empty text"),
        (dict(ids=torch.arange(12)), "ids must not hold mask_id = 10"),
        (dict(end_id=10), "must differ, got {'mask_id': 10, 'start_id': 11, 'end_id': 10}"),
        (dict(share=0.0), r"share must be a number in \(0, 1\), got 0.0"),
        (dict(mean_span=0.5), r"mean_span must be a number in \[1, inf\), got 0.5"),
        (dict(start_id=-1), r"start_id must be a number in \[0, inf\), got -1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_blank_infilling_refuses(arguments, message):
    right = dict(ids=torch.arange(10), mask_id=10, start_id=11, end_id=12)
    tasks.blank_infilling(**right)
    with pytest.raises(ValueError, match=message):
        tasks.blank_infilling(**right | arguments)
