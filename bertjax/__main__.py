"""`python -m bertjax`, where the `bertjax` command is not on the path."""

from bertjax.cli.main import main

main()
