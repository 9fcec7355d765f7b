"""`python -m bertjax`, which is equivalent to the command `bertjax`."""

from bertjax.cli.main import main

main()
