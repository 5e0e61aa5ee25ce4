"""What the YAML files beside this one name: documents as the harness takes them.

It calls a maker with all metadata that there is: of the task, of the command, in its own command
line also the arguments of the model. A maker is handed what it has a parameter for.
"""

import inspect

from cheems_lab.evaluation import documents
from cheems_ref.text import read_text


def held_out(**metadata):
    return _made(documents.held_out_documents, metadata)


def cloze(**metadata):
    return _made(documents.cloze_documents, metadata)


def recall(**metadata):
    return _made(documents.recall_documents, metadata)


def needle(**metadata):
    return _made(documents.needle_documents, metadata)


def _made(make, metadata):
    from datasets import Dataset  # which comes with the harness

    names = inspect.signature(make).parameters
    options = {name: metadata[name] for name in names if name in metadata}
    if "text" in names:  # metadata has the name of its file; without one it is Python's manual
        options["text"] = read_text(metadata.get("text"))
    return {"test": Dataset.from_list(make(**options))}
