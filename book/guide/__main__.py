"""`python -m book.guide`."""

import sys

from book.guide.lecturer_guide import main

sys.exit(main())
