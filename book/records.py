"""Write the records that figures are drawn from where a live run would not be reproducible.

    python book/records.py NAME ...

A record holds what a figure shows, and how it came about: command, machine, versions, date.
"""

import argparse
import datetime
import json
import platform
from pathlib import Path

import torch

from cheems_ref import ssd, text

RECORDS = Path(__file__).parents[1] / "figures" / "records"


def letters():
    """The states of three counting heads over the first bytes of Python's manual."""
    rows = " etaoinshrdlcumfpgwybvk"
    length, half_lives = 400, (4, 32, 256)
    ids = text.text_to_ids(text.read_text())[:length]
    key = torch.nn.functional.one_hot(ids, 256).double()[None, :, None]  # (b, l, g, n)
    rate = -torch.tensor(2.0).log().double() / torch.tensor(half_lives).double()
    ones = torch.ones(1, 1, len(half_lives), dtype=torch.float64)
    state, states = torch.zeros(1, len(half_lives), 1, 256, dtype=torch.float64), []
    for t in range(length):
        _, state = ssd.ssd_step(ones[:, 0, :, None], ones[:, 0], rate, key[:, t], key[:, t], state)
        states.append(state[0, :, 0])
    counts = torch.stack(states)[:, :, list(rows.encode())]  # (l, h, letters)
    return {
        "letters": ["space" if letter == " " else letter for letter in rows],
        "states": {
            str(half_life): [[round(c, 4) for c in row] for row in counts[:, i].tolist()]
            for i, half_life in enumerate(half_lives)
        },
    }


WRITERS = {"03_letters": letters}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="+", choices=WRITERS, metavar="NAME", help=", ".join(WRITERS)
    )
    for name in parser.parse_args().names:
        record = {
            "command": f"python book/records.py {name}",
            "machine": platform.machine(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "seed": None,
            "date": datetime.date.today().isoformat(),
            **WRITERS[name](),
        }
        RECORDS.mkdir(parents=True, exist_ok=True)
        (RECORDS / f"{name}.json").write_text(json.dumps(record) + "\n")
        print(f"figures/records/{name}.json")


if __name__ == "__main__":
    main()
