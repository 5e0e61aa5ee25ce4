"""Synthetic tasks that ask one thing of a model: to look up what stands further up in the text.

    multi_query_recall   key-value pairs, then each key once more, at gaps drawn from a power law
    needle               one sentence planted in real text, and at the end the question for it

Both return `input_ids` (b, l) and `targets` (b, l), int64. A target stands at the place of the
token whose logits it is compared with, -100 everywhere else:
`F.cross_entropy(logits.flatten(0, 1), targets.flatten())` is the loss, and nothing is shifted.

Taught in notebook 08.
Source: WM §4.1, App. C.1 (recall); Arora et al. (2024), *Zoology* (recall with idle zeros);
OTCE Fig. 10 (needle).
"""

import torch
from jaxtyping import Int
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
