"""`python -m book.slides`."""

import sys

from book.slides.build_slides import main

sys.exit(main())
