"""Synthetic tasks: the answer is further up in the text, and a model must look it up.

    multi_query_recall   key-value pairs, then each key again, at gaps drawn from a power law
    needle               one sentence planted in real text, and a question about it at the end
    blank_infilling      a text with spans cut out, then the spans, which the model has to write

Each target is at the position of the logits that predict it, and is -100 everywhere else. So
`F.cross_entropy(logits.flatten(0, 1), targets.flatten())` is the loss, without a shift. Ids and
targets are int64.

Taught in notebook 08.
Source: WM §4.1, App. C.1 (recall); Arora et al. (2024), *Zoology* (recall with zeros as filler);
OTCE Fig. 10 (needle); Du et al. (2022), *GLM*, the objective of Ch §4.1 and OTCE §4.1 (blanks).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cheems_ref import check
from cheems_ref.text import read_text, text_to_ids

IGNORED = -100  # torch's cross entropy skips such targets

NEEDLE = " The code of {name} is {code}. "  # and, without ". ", the question
NAME, CODE = 4, 4  # letters of a name, digits of a code

Tokens = Int[Tensor, "b l"]


def multi_query_recall(
    n_rows: int,
    length: int,
    n_pairs: int,
    vocab_size: int,
    *,
    power: float | int = 0.01,
    random_fill: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tokens, Tokens]:
    """Draw rows that begin with key-value pairs and later ask for the value of each key once.

    With length 16, 2 pairs and a vocabulary of 12 (keys 1 to 5, values 6 to 11), a row may be

        key val key val | que         que
          2   8   4   7 |   4   x   x   2   x   x   x   x   x   x   x   x     input_ids
          .   .   .   . |   7   .   .   8   .   .   .   .   .   .   .   .     targets (. is -100)

    where x is a token other than the row's keys and values, or 0 if `random_fill` is False. The
    queries are at even places after the pairs. The j-th such place, j = 1, 2, ..., is drawn with a
    probability proportional to j^(power - 1), without replacement.

    Args:
        n_rows: b, the number of rows.
        length: l, even, at least 4 tokens per pair.
        n_pairs: pairs in each row, with different keys and different values.
        vocab_size: the number of token ids. Ids from 1 to below vocab_size // 2 are keys, and the
            ids from there on are values.
        power: exponent of the law, in (0, 1]; 1 spreads queries evenly.
        random_fill: whether the filler x is random (WM) or 0 (Arora et al.).
        generator: source of the random numbers; None for torch's default.

    Returns:
        input_ids (b, l), and targets (b, l), which hold each value at the place of its query.

    Raises:
        ValueError: the length is odd or too short for the pairs, or the vocabulary too small.
    """
    check.sizes(n_rows=n_rows, length=length, n_pairs=n_pairs, vocab_size=vocab_size)
    check.numbers("(0, 1]", power=power)
    if length % 2:
        raise ValueError(f"length must be even, got {length}")
    half = vocab_size // 2
    if length < 4 * n_pairs:
        raise ValueError(f"length = {length} has no room for n_pairs = {n_pairs}: 4 tokens each")
    if half - 1 < n_pairs:
        raise ValueError(f"vocab_size = {vocab_size} is too small for n_pairs = {n_pairs} in a row")

    def draw(weights, count):
        """Draw `count` different numbers per row, one after the other, with these weights."""
        return torch.multinomial(weights.expand(n_rows, -1), count, generator=generator)

    keys = 1 + draw(torch.ones(half - 1), n_pairs)  # (b, pairs)
    values = half + draw(torch.ones(vocab_size - half), n_pairs)
    free = torch.arange(1, (length - 2 * n_pairs) // 2 + 1, dtype=torch.float64)
    places = 2 * n_pairs + 2 * draw(free ** (power - 1), n_pairs)

    input_ids = torch.zeros(n_rows, length, dtype=torch.int64)
    if random_fill:
        input_ids = _other_tokens(torch.cat([keys, values], 1), vocab_size, length, generator)
    input_ids[:, : 2 * n_pairs] = torch.stack([keys, values], dim=2).flatten(1)
    input_ids.scatter_(1, places, keys)
    targets = torch.full_like(input_ids, IGNORED).scatter_(1, places, values)
    return input_ids, targets


def _other_tokens(taken, vocab_size, length, generator):
    """Draw tokens (b, length) uniformly from the ids that are not in the row of `taken` (b, j)."""
    taken = taken.sort(dim=1).values
    ranks = torch.randint(vocab_size - taken.shape[1], (len(taken), length), generator=generator)
    # Before the i-th taken token (from 0) there are taken[i] - i others.
    skipped = torch.searchsorted(taken - torch.arange(taken.shape[1]), ranks, right=True)
    return ranks + skipped


def needle(
    n_rows: int,
    length: int,
    depth: float | int,
    *,
    haystack: Int[Tensor, " n"] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tokens, Tokens]:
    """Plant one sentence in real text, and ask a question about it at the end. Ids are bytes.

        ... the value of The code of qhzt is 4821. an expression ...  The code of qhzt is 482
                                                                                        4821
    The lower line shows the targets: the four digits, from the position of the space before them.

    Args:
        n_rows: b, the number of rows, each cut from the haystack at a random place.
        length: l, in bytes, with the sentence and the question.
        depth: place of the sentence, from 0 (the beginning) to 1 (just before the question).
        haystack: bytes of a text, at least `length` of them; None for Python's manual.
        generator: source of the random numbers; None for torch's default.

    Returns:
        input_ids (b, l), and targets (b, l).

    Raises:
        ValueError: depth is outside [0, 1], no room for sentence and question, or the haystack is
            too short.
    """
    check.sizes(n_rows=n_rows, length=length)
    check.numbers("[0, 1]", depth=depth)
    haystack = text_to_ids(read_text()) if haystack is None else haystack
    check.shapes(haystack=(haystack, "l"))
    check.dtypes(check.INTEGERS, haystack=haystack)
    check.entries("[0, 256)", haystack=haystack)
    size = len(NEEDLE.format(name=" " * NAME, code=" " * CODE))
    room = length - size - (size - 2) + 1  # for the sentence and for the question
    if room < 0:
        raise ValueError(f"length = {length} has no room for sentence and question: {-room} short")
    if len(haystack) < room:
        raise ValueError(f"the haystack has {len(haystack)} bytes, fewer than the {room} of a text")
    before = round(depth * room)

    rows = []
    for start in torch.randint(len(haystack) - room + 1, (n_rows,), generator=generator).tolist():
        letters = torch.randint(26, (NAME,), generator=generator).tolist()
        digits = torch.randint(10, (CODE,), generator=generator).tolist()
        name, code = "".join(chr(ord("a") + i) for i in letters), "".join(map(str, digits))
        sentence = text_to_ids(NEEDLE.format(name=name, code=code))
        hay = haystack[start : start + room].long()
        rows.append(torch.cat([hay[:before], sentence, hay[before:], sentence[:-2]]))
    text = torch.stack(rows)  # one byte longer than the input: the last byte is only a target
    targets = torch.full_like(text[:, 1:], IGNORED)
    targets[:, -CODE:] = text[:, -CODE:]
    return text[:, :-1], targets


class Blanks(NamedTuple):
    """A text with blanks (part A), followed by the spans that were cut out (part B): l tokens.

    targets are -100 in part A. In part A a token's position is its place, and its block position is
    0. In part B a token's position is the place of the blank, and its block position counts from 1.
    visible[t, s] is True where token t attends to token s: all tokens attend to part A, and a token
    of part B also to itself and to earlier tokens of part B.
    """

    input_ids: Int[Tensor, " l"]
    targets: Int[Tensor, " l"]
    position_ids: Int[Tensor, " l"]
    block_position_ids: Int[Tensor, " l"]
    visible: Bool[Tensor, "l l"]


def blank_infilling(
    ids: Int[Tensor, " l"],
    *,
    mask_id: int,
    start_id: int,
    end_id: int,
    share: float | int = 0.15,
    mean_span: float | int = 3.0,
    generator: torch.Generator | None = None,
) -> Blanks:
    """Cut spans out of a text, and append them in random order.

    This is "a b c d e f" without the spans "b c" and "f", with M, S, E for the three ids:

        a M d e M | S f   S b c      input_ids
        . . . . . | f E   b c E      targets (. is -100)
        0 1 2 3 4 | 4 4   1 1 1      position_ids
        0 0 0 0 0 | 1 2   1 2 3      block_position_ids

    The lengths of the spans are drawn from a Poisson distribution without its zeros, until the
    share is reached. All placements with at least one token between two spans are equally likely.

    Args:
        ids: the text, l tokens.
        mask_id, start_id, end_id: M replaces a span in part A, S is the input before the first
            token of a span, and E is the target after its last token. None of them occurs in ids.
        share: of the tokens to cut out, in (0, 1); the last span may exceed it.
        mean_span: mean of the Poisson distribution, at least 1.
        generator: source of the random numbers; None for torch's default.

    Raises:
        ValueError: the text is empty or contains one of the three ids, or two ids are the same.

    Source: Du et al. (2022), GLM, §2.1.
    """
    check.shapes(ids=(ids, "l"))
    check.dtypes(check.INTEGERS, ids=ids)
    ids = ids.long()  # ids of a byte tensor never equal 256
    check.numbers("(0, 1)", share=share)
    check.numbers("[1, inf)", mean_span=mean_span)
    special = dict(mask_id=mask_id, start_id=start_id, end_id=end_id)
    check.numbers("[0, inf)", **special)
    if not len(ids):
        raise ValueError("ids is an empty text: there is nothing to cut out")
    if len({*special.values()}) < 3:
        raise ValueError(f"mask_id, start_id and end_id must differ, got {special}")
    for name, token in special.items():
        if (ids == token).any():
            raise ValueError(f"ids must not hold {name} = {token}")

    lengths = _span_lengths(len(ids), share, mean_span, generator)
    kept = len(ids) - sum(lengths)
    # A span is before one of the kept tokens, or after the last one: no two before the same.
    gaps = torch.randperm(kept + 1, generator=generator)[: len(lengths)].sort().values.tolist()
    starts = [gap + sum(lengths[:i]) for i, gap in enumerate(gaps)]
    edges = [edge for start, n in zip(starts, lengths, strict=True) for edge in (start, start + n)]
    pieces = ids.tensor_split(edges)  # kept, span, kept, ..., span, kept
    spans = pieces[1::2]

    mask, first, last = (torch.tensor([token]) for token in special.values())
    part_a = torch.cat([mask if i % 2 else piece for i, piece in enumerate(pieces)])
    blanks = (part_a == mask_id).nonzero().flatten().tolist()
    input_ids, targets = [part_a], [torch.full_like(part_a, IGNORED)]
    positions, block_positions = [torch.arange(len(part_a))], [torch.zeros_like(part_a)]
    for i in torch.randperm(len(spans), generator=generator).tolist():
        input_ids.append(torch.cat([first, spans[i]]))
        targets.append(torch.cat([spans[i], last]))
        positions.append(torch.full_like(targets[-1], blanks[i]))
        block_positions.append(torch.arange(1, len(targets[-1]) + 1))
    parts = [torch.cat(part) for part in (input_ids, targets, positions, block_positions)]
    place = torch.arange(len(parts[0]))
    visible = (place <= place[:, None]) | (place < len(part_a))
    return Blanks(*parts, visible)


def _span_lengths(length, share, mean_span, generator):
    """Draw lengths of spans until they reach the share, or until the text has no room for more."""
    lengths = []
    while sum(lengths) < share * length:
        room = length - sum(lengths) - len(lengths)  # one token between two spans
        if room < 1:
            break
        drawn = int(torch.poisson(torch.tensor(float(mean_span)), generator=generator))
        lengths += [min(drawn, room)] if drawn else []
    return lengths
