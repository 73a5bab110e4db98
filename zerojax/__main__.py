"""`python -m zerojax` is `zerojax`."""

from zerojax.cli import program

program()
