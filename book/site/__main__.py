"""`python -m book.site`."""

import sys

from book.site.build_site import main

sys.exit(main())
