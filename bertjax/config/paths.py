"""Which fields of `config.data` say where data lies; it may lie elsewhere tomorrow, or on another machine."""

PATHS = ("corpus", "path", "vocabulary", "labels")
# Relative to `data.path`, where there is one.
FILES = ("train_file", "dev_file", "test_file", "eval_file")
FIELDS = tuple(f"data.{name}" for name in (*PATHS, *FILES))
