"""`python -m bertjax`, which equals the `bertjax` command."""

from bertjax.cli.main import main

main()
