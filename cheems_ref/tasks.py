"""Synthetic tasks that ask one thing of a model: to look up what stands further up in the text.

    multi_query_recall   key-value pairs, then each key once more, at gaps drawn from a power law
    needle               one sentence planted in real text, and at the end the question for it
    blank_infilling      a text with spans cut out, and the spans behind it, to be written

A target stands at the place of the token whose logits it is compared with, -100 everywhere else:
`F.cross_entropy(logits.flatten(0, 1), targets.flatten())` is the loss, and nothing is shifted.
Everything is int64.

Taught in notebook 08.
Source: WM §4.1, App. C.1 (recall); Arora et al. (2024), *Zoology* (recall with idle zeros);
OTCE Fig. 10 (needle); Du et al. (2022), *GLM*, with which Ch §4.1 and OTCE §4.1 train (blanks).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cheems_ref import check
from cheems_ref.text import read_text, text_to_ids

IGNORED = -100  # what torch's cross entropy leaves out

NEEDLE = " The code of {name} is {code}. "
QUESTION = " The code of {name} is {code}"
LETTERS, NAME, CODE = b"abcdefghijklmnopqrstuvwxyz", 4, 4  # a name of 4 letters, a code of 4 digits

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
    """Draw texts that begin with key-value pairs and then ask for the value of each key once.

    With length 16, 2 pairs and a vocabulary of 12 (keys 1 to 5, values 6 to 11), a row may be

        key val key val | que         que
          2   8   4   7 |   4   x   x   2   x   x   x   x   x   x   x   x     input_ids
          .   .   .   . |   7   .   .   8   .   .   .   .   .   .   .   .     targets (. is -100)

    where x is a token that is none of the row's keys and values, or 0 if `random_fill` is False.
    A query may stand at every second place after the pairs; its place j = 1, 2, ... among these
    has the probability j^(power - 1) (up to a factor), those that are taken left out.

    Args:
        n_rows: b, the number of texts.
        length: l, even, room for 4 tokens per pair.
        n_pairs: pairs in each text; no key and no value occurs in two of them.
        vocab_size: the number of token ids. Id 0 is neither; keys are the ids below half of it,
            values those from half of it on.
        power: exponent of the law, in (0, 1]; 1 spreads queries evenly.
        random_fill: whether idle places hold random tokens (WM) or 0 (Arora et al.).
        generator: where the random numbers come from; None for torch's own.

    Returns:
        input_ids (b, l), and targets (b, l): the value at the place of its query.

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
    if half - 1 < n_pairs or vocab_size <= 2 * n_pairs + 1:
        raise ValueError(f"vocab_size = {vocab_size} is too small for n_pairs = {n_pairs} in a row")

    def draw(weights, count):
        """`count` different numbers per row, drawn one after the other by these weights."""
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
    """Tokens (b, length), each drawn evenly from all that are not in its row of `taken` (b, j)."""
    taken = taken.sort(dim=1).values
    size = (len(taken), length)
    ranks = torch.randint(vocab_size - taken.shape[1], size, generator=generator)
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
    """Plant one sentence in real text, and ask for it at the end, in bytes.

        ... the value of The code of qhzt is 4821. an expression ...  The code of qhzt is 482
                                                                                        4821
    The lower line are the targets: the four digits, from the space before them on.

    Args:
        n_rows: b, the number of texts, each cut from the haystack at a place of its own.
        length: l, in bytes, the question included.
        depth: where the sentence stands, from 0 (at the beginning) to 1 (just before the question).
        haystack: bytes of a text, at least `length` of them; None for Python's manual.
        generator: where the random numbers come from; None for torch's own.

    Returns:
        input_ids (b, l), and targets (b, l).

    Raises:
        ValueError: depth is outside [0, 1], no room for sentence and question, or the haystack is
            shorter than a text.
    """
    check.sizes(n_rows=n_rows, length=length)
    check.numbers("[0, 1]", depth=depth)
    haystack = text_to_ids(read_text()) if haystack is None else haystack
    check.shapes(haystack=(haystack, "l"))
    check.dtypes(check.INTEGERS, haystack=haystack)
    check.entries("[0, 256)", haystack=haystack)
    blank = dict(name=" " * NAME, code=" " * CODE)
    room = length - len(NEEDLE.format(**blank)) - len(QUESTION.format(**blank)) + 1
    if room < 0:
        raise ValueError(f"length = {length} has no room for sentence and question: {-room} short")
    if len(haystack) < room:
        raise ValueError(f"the haystack has {len(haystack)} bytes, fewer than the {room} of a text")
    before = round(depth * room)

    rows = []
    for start in torch.randint(len(haystack) - room + 1, (n_rows,), generator=generator).tolist():
        letters = torch.randint(len(LETTERS), (NAME,), generator=generator)
        name = bytes(LETTERS[i] for i in letters.tolist()).decode()
        digits = torch.randint(10, (CODE,), generator=generator)
        told = dict(name=name, code="".join(map(str, digits.tolist())))
        hay = haystack[start : start + room].long()
        sentence, question = (text_to_ids(text.format(**told)) for text in (NEEDLE, QUESTION))
        rows.append(torch.cat([hay[:before], sentence, hay[before:], question]))
    text = torch.stack(rows)  # one byte longer than what is read
    targets = torch.full_like(text[:, 1:], IGNORED)
    targets[:, -CODE:] = text[:, -CODE:]
    return text[:, :-1], targets


class Blanks(NamedTuple):
    """A text with blanks (part A), and behind it what was cut out (part B): l' tokens in all.

    targets are -100 in part A. In part A a token's position is its place there, and its block
    position 0; in part B its position is the place of the blank, and its block position counts from
    1. visible[t, s] says whether token t may look at token s: everyone at part A, and part B at
    what stands before it in part B and at itself.
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
    """Cut spans out of a text, and set them behind it in an order drawn at random.

    With the spans "b c" and "f" cut out of "a b c d e f", and M, S, E the three ids:

        a M d e M | S f   S b c      input_ids
        . . . . . | f E   b c E      targets (. is -100)
        0 1 2 3 4 | 4 4   1 1 1      position_ids
        0 0 0 0 0 | 1 2   1 2 3      block_position_ids

    Lengths of spans are drawn from a Poisson distribution, zeros left out, until the share is
    reached; all ways to place them with at least one token between two are equally likely.

    Args:
        ids: the text, l tokens.
        mask_id, start_id, end_id: M, which stands for a span in part A; S, from which a span is
            begun; and E, which is to be written after it. None of them occurs in ids.
        share: of the tokens that are cut out, in (0, 1); the last span may take it further.
        mean_span: mean of the Poisson distribution, at least 1.
        generator: where the random numbers come from; None for torch's own.

    Raises:
        ValueError: the text is empty, or holds one of the three ids, or two of these are the same.

    Source: Du et al. (2022), GLM, §2.1.
    """
    check.shapes(ids=(ids, "l"))
    check.dtypes(check.INTEGERS, ids=ids)
    ids = ids.long()  # as a byte, 256 is 0
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
    # A span stands before one of the kept tokens, or behind the last: no two before the same.
    gaps = torch.randperm(kept + 1, generator=generator)[: len(lengths)].sort().values.tolist()
    starts = [gap + sum(lengths[:i]) for i, gap in enumerate(gaps)]
    spans = [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    blanks = [gap + i for i, gap in enumerate(gaps)]  # their places in part A

    mask, first, last = (torch.tensor([token]) for token in special.values())
    part_a, end = [], 0
    for start, n in zip(starts, lengths, strict=True):
        part_a += [ids[end:start], mask]
        end = start + n
    part_a = torch.cat([*part_a, ids[end:]])

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
    """Lengths of spans, drawn until they make up the share; cut where the text is too short."""
    lengths = []
    while sum(lengths) < share * length:
        room = length - sum(lengths) - len(lengths)  # one token between two spans
        if room < 1:
            break
        drawn = int(torch.poisson(torch.tensor(float(mean_span)), generator=generator))
        lengths += [min(drawn, room)] if drawn else []
    return lengths
