"""`python -m liveroll`: the command line."""

from liveroll.cli import main

main()
