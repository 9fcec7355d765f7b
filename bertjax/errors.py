"""The two ways a command can end badly, each with its exit code."""


class BertjaxError(Exception):
    """A failure the user should read as one line: what, which value, where, and the way out. Exit code 1."""

    exit_code = 1


class UsageError(BertjaxError):
    """The user asked for something that cannot be: a wrong flag, path, name or value. Exit code 2."""

    exit_code = 2
