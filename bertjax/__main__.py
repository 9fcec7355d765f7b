"""`python -m bertjax`, where the `bertjax` command is not on the path."""

from bertjax.cli import main

main()
