"""`python -m holdfast.cli` is the same as the command `holdfast`."""

from holdfast.cli import main

main()
