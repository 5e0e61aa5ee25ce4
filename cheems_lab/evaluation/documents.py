"""What an evaluation asks, as documents for lm-evaluation-harness: letters, which are bytes or few.

    held_out    a text, to be predicted from its beginning to its end
    cloze       a passage, and four ways in which it may go on, one of them its own
    recall      key-value pairs and one of the keys; choices are all values of the row
    needle      a text with one sentence planted in it, and the question for its code

Nothing is downloaded: text is the user's own or Python's manual, and the same seed makes the same
documents. The YAML files beside this one tell the harness what to do with them.
Source: WM §4.1 (recall); OTCE Fig. 10 (needle).
"""

import torch

from cheems_ref import check
from cheems_ref.tasks import CODE, multi_query_recall, needle
from cheems_ref.text import text_to_ids

CHOICES = 4
FIRST = "!"  # id 0 of recall: what is printed in ASCII, and no space, which the harness would move
LETTERS = 94  # from "!" to "~"
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def held_out_documents(text: str) -> list[dict]:
    """Return a text as one document, so that every byte but the first has one before it."""
    return [{"text": text}]


def cloze_documents(
    text: str, *, n_rows: int = 200, length: int = 256, after: int = 40, seed: int = 0
) -> list[dict]:
    """Cut passages out of a text, and after each its own continuation among three from elsewhere.

    Args:
        text: where all of them come from.
        n_rows: number of passages, at places drawn at random; none is white space alone.
        length: of a passage and its continuation, in bytes; a letter that is cut through at the
            beginning or at the end is left out.
        after: bytes of a continuation. A foreign one overlaps neither passage nor continuation,
            and no two are the same.
        seed: of the places, and of the order in which the choices stand.

    Raises:
        ValueError: no room for a passage, or the text is too short, or repeats itself too much.
    """
    check.sizes(n_rows=n_rows, length=length, after=after)
    data, before = text.encode("utf-8"), length - after
    if before < 1:
        raise ValueError(f"length = {length} has no room for a passage before {after} bytes")
    places = [i for i in range(before, len(data) - after + 1) if _begins_a_letter(data[i])]
    if not places:
        raise ValueError(f"the text has {len(data)} bytes, a passage with its end {length}")
    generator = torch.Generator().manual_seed(seed)
    elsewhere = torch.randperm(len(data) - after + 1, generator=generator).tolist()
    documents = []
    for first in torch.randint(len(places), (n_rows,), generator=generator).tolist():
        place = _first_after_words(data, before, _round_from(first, places))
        start = int(torch.randint(len(elsewhere), (1,), generator=generator))
        choices = _continuations(data, place, before, after, _round_from(start, elsewhere))
        order = torch.randperm(CHOICES, generator=generator).tolist()
        documents.append(
            {
                "passage": _whole_letters(data[place - before : place]),
                "choices": [choices[j] for j in order],
                "answer": order.index(0),
            }
        )
    return documents


def _round_from(start, items):
    """All of them once, from one of them on."""
    return (items[(start + i) % len(items)] for i in range(len(items)))


def _first_after_words(data, before, places):
    """The harness moves white space at the end of a context to what follows, and refuses a context
    of nothing else.
    """
    for place in places:
        if _whole_letters(data[place - before : place]).strip():
            return place
    raise ValueError(f"the text has no passage of {before} bytes that is not white space alone")


def _continuations(data, place, before, after, others):
    """A passage's own first, then those of other places, none of them twice."""
    found = [_whole_letters(data[place : place + after])]
    for other in others:
        apart = other + after <= place - before or other >= place + after
        if apart and _begins_a_letter(data[other]):
            found += {_whole_letters(data[other : other + after])} - {*found}
            if len(found) == CHOICES:
                return found
    raise ValueError(
        f"the text is too short, or repeats itself: it has no {CHOICES - 1} other continuations of "
        f"{after} bytes away from a passage"
    )


def _begins_a_letter(byte):
    """Or is one, in UTF-8."""
    return byte & 0b11000000 != 0b10000000


def _whole_letters(data):
    return data.decode("utf-8", errors="ignore")


def recall_documents(
    *, n_rows: int = 64, length: int = 256, n_pairs: int = 8, vocab_size: int = 94, seed: int = 0
) -> list[dict]:
    """Draw rows of multi-query recall, and ask for each of their keys in a document of its own.

    A document is the row up to the key, each id as one letter from "!" on; its choices are the
    values of the row, so that guessing is right once in n_pairs.

    Args:
        n_rows, n_pairs, vocab_size: of `tasks.multi_query_recall`; at most 94 ids.
        length: of a row; an odd one is taken one shorter.
        seed: of the rows.

    Raises:
        ValueError: more ids than letters, or what `multi_query_recall` refuses.
    """
    if vocab_size > LETTERS:
        raise ValueError(f"vocab_size = {vocab_size} is more than the {LETTERS} letters there are")
    generator = torch.Generator().manual_seed(seed)
    rows = multi_query_recall(n_rows, length // 2 * 2, n_pairs, vocab_size, generator=generator)
    documents = []
    for ids, targets in zip(*rows, strict=True):
        letters = "".join(chr(ord(FIRST) + i) for i in ids.tolist())
        keys, values = letters[: 2 * n_pairs : 2], letters[1 : 2 * n_pairs : 2]
        for place in (targets >= 0).nonzero().flatten().tolist():
            answer = keys.index(letters[place])
            row = letters[: place + 1]
            documents.append({"row": row, "choices": list(values), "answer": answer})
    return documents


def needle_documents(
    text: str, *, n_rows: int = 20, length: int = 256, seed: int = 0
) -> list[dict]:
    """Plant needles in a text at five depths, `n_rows` at each, and ask for their codes.

    Args:
        text: the hay.
        n_rows: documents for each of the depths 0, 1/4, 1/2, 3/4 and 1.
        length: what a model reads, in bytes; bytes of letters that are cut through are left out.
        seed: of the places and the codes.

    Raises:
        ValueError: what `tasks.needle` refuses.
    """
    generator, hay = torch.Generator().manual_seed(seed), text_to_ids(text)
    documents = []
    for depth in DEPTHS:
        rows = needle(n_rows, length, depth, haystack=hay, generator=generator)
        for ids, targets in zip(*rows, strict=True):
            asked = _whole_letters(bytes(ids[: 1 - CODE].tolist()))
            code = bytes(targets[-CODE:].tolist()).decode("ascii")
            documents.append({"text": asked, "code": code, "depth": depth})
    return documents
