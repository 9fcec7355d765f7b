"""Estimates of memory, time and cost on TPUs (`bertjax plan`), and of parameters and FLOPs (`bertjax describe`)."""
