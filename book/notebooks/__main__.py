"""`python -m book.notebooks`."""

import sys

from book.notebooks.build_notebooks import main

sys.exit(main())
