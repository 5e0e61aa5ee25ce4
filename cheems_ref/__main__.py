"""`python -m cheems_ref` is the `cheems` command of `cheems_lab`."""

import sys

from cheems_lab.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
