"""Estimates of a run: memory, time and cost on TPUs (`bertjax plan`), parameters and FLOPs (`bertjax describe`)."""
