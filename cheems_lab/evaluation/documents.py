"""Documents of the tasks for lm-evaluation-harness.

    held_out    a text, to predict from its beginning to its end
    cloze       a passage and four continuations, one of them its own
    recall      key-value pairs and one of the keys; the choices are all values of the row
    needle      a text with one planted sentence, and the question for its code

The YAML file of each task, in this folder, names its function here. The harness calls the function
with all metadata: the options of the task, the length in bytes, and `text`, the path of a text
(without it Python's manual). Nothing is downloaded, and a seed always gives the same documents.
Source: WM §4.1 (recall); OTCE Fig. 10 (needle).
"""

from typing import Any

import torch

from cheems_ref import check
from cheems_ref.tasks import CODE, multi_query_recall, needle
from cheems_ref.text import read_text, text_to_ids

CHOICES = 4
FIRST, LETTERS = "!", 94  # ids of recall are the printable letters, without the blank
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def held_out_task(text: str | None = None, **_: Any) -> dict:
    """Return a text as one document, so that every byte but the first has one before it."""
    return _test_split([{"text": read_text(text)}])


def cloze_task(
    text: str | None = None,
    *,
    n_rows: int = 200,
    length: int = 256,
    after: int = 40,
    seed: int = 0,
    **_: Any,
) -> dict:
    """Cut passages out of a text, each with its continuation and three from other places.

    Args:
        text: path of the text.
        n_rows: number of documents, at most one for each block of the text.
        length: of a block, in bytes: a passage and its continuation.
        after: letters of a continuation.
        seed: of the places and of the order of the choices.

    Raises:
        ValueError: no room for a passage, or fewer than four continuations in the text.
    """
    check.sizes(n_rows=n_rows, length=length, after=after)
    if length <= after:
        raise ValueError(f"length = {length} has no room for a passage before {after} bytes")
    data = read_text(text).encode("utf-8")
    blocks = [_whole_letters(data[i : i + length]) for i in range(0, len(data), length)]
    # The harness rejects a context of white space alone.
    blocks = [block for block in blocks if len(block) > after and block[:-after].strip()]
    ends = list(dict.fromkeys(block[-after:] for block in blocks))
    if len(ends) < CHOICES:
        raise ValueError(
            f"the text has {len(data)} bytes, and {len(ends)} different continuations of {after} "
            f"bytes in blocks of length = {length}; the task takes {CHOICES}"
        )
    generator, documents = torch.Generator().manual_seed(seed), []
    for i in torch.randperm(len(blocks), generator=generator)[:n_rows].tolist():
        passage, own = blocks[i][:-after], blocks[i][-after:]
        drawn = torch.randperm(len(ends), generator=generator)[:CHOICES].tolist()
        choices = [ends[j] for j in drawn]
        if own not in choices:
            choices[torch.randint(CHOICES, (), generator=generator)] = own
        documents.append({"passage": passage, "choices": choices, "answer": choices.index(own)})
    return _test_split(documents)


def recall_task(
    *,
    n_rows: int = 64,
    length: int = 256,
    n_pairs: int = 8,
    vocab_size: int = LETTERS,
    seed: int = 0,
    **_: Any,
) -> dict:
    """Draw rows of multi-query recall, with one document for each of their keys.

    A document is the row up to the key, each id as one letter from "!" on; its choices are the
    values of the row, so that a guess is right once in n_pairs.

    Args:
        n_rows, n_pairs, vocab_size: of `tasks.multi_query_recall`; at most 94 ids.
        length: of a row; an odd length is shortened by one.
        seed: of the rows.

    Raises:
        ValueError: more ids than letters, or as `multi_query_recall`.
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
            answer, row = keys.index(letters[place]), letters[: place + 1]
            documents.append({"row": row, "choices": list(values), "answer": answer})
    return _test_split(documents)


def needle_task(
    text: str | None = None, *, n_rows: int = 20, length: int = 256, seed: int = 0, **_: Any
) -> dict:
    """Plant needles in a text at five depths; each document ends with the question for its code.

    Args:
        text: path of the haystack.
        n_rows: documents for each of the depths 0, 1/4, 1/2, 3/4 and 1.
        length: of the haystack, the question and the code, in bytes.
        seed: of the places and the codes.

    Raises:
        ValueError: as `tasks.needle`.
    """
    generator, hay = torch.Generator().manual_seed(seed), text_to_ids(read_text(text))
    documents = []
    for depth in DEPTHS:
        rows = needle(n_rows, length, depth, haystack=hay, generator=generator)
        for ids, targets in zip(*rows, strict=True):
            question = _whole_letters(bytes(ids[: 1 - CODE].tolist()))
            code = bytes(targets[-CODE:].tolist()).decode("ascii")
            documents.append({"text": question, "code": code, "depth": depth})
    return _test_split(documents)


def _whole_letters(data):
    """The text in bytes, without a letter that is cut at either end."""
    return data.decode("utf-8", errors="ignore")


def _test_split(documents):
    from datasets import Dataset  # a dependency of the harness

    return {"test": Dataset.from_list(documents)}
