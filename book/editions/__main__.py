"""`python -m book.editions`."""

from book.editions.build_editions import main

main()
