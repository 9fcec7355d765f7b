"""Settings as frozen dataclasses: fields of configs, their types, limits and meanings, each written once."""
