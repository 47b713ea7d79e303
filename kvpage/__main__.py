"""`python -m kvpage`: the command line, where the script `kvpage` is not on the path."""

from kvpage.tools.cli import main

main()
