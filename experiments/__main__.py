"""Write the records that figures are drawn from where a live run would not be reproducible.

    python -m experiments NAME ...

experiments/chapter_NN.py has the recipe of each record, experiments/records the records. A record
holds the numbers of a figure and their origin: command, machine, versions, date. Run the command
again to resume a recipe that was stopped.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import sys
from pathlib import Path

import torch

from experiments.runner import KEEP_MEMORY, RECORDS, ROOT

CHAPTERS = [path.stem for path in sorted(Path(__file__).parent.glob("chapter_*.py"))]
MODULES = [importlib.import_module(f"experiments.{chapter}") for chapter in CHAPTERS]
RECIPES = {name: recipe for module in MODULES for name, recipe in module.RECIPES.items()}


def main():
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m experiments", description=description)
    names = ", ".join(RECIPES)
    parser.add_argument("names", nargs="+", choices=RECIPES, metavar="NAME", help=names)
    names = parser.parse_args().names
    if not KEEP_MEMORY.items() <= os.environ.items():  # which glibc reads when a program starts
        command = [sys.executable, "-m", "experiments", *names]
        os.execve(sys.executable, command, os.environ | KEEP_MEMORY)
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    for name in names:
        torch.set_default_dtype(torch.float32)  # a record before this one may have changed it
        record = {
            "command": f"python -m experiments {name}",
            "machine": platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "date": datetime.date.today().isoformat(),
            **RECIPES[name](),
        }
        path = RECORDS / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record) + "\n")
        print(path.relative_to(ROOT).as_posix())


if __name__ == "__main__":
    main()
