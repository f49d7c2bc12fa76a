"""`python -m paceline.cli` is `paceline`."""

from paceline.cli import main

main()
