"""Estimates of memory, time and cost on TPUs (`bertjax plan`), and of parameters and FLOPs (`bertjax describe`)."""

# Default of `--mfu`: the MFU of Google's MLPerf run of BERT-Large on 64 TPU v4 chips (TensorFlow, 196 sequences/s per
# chip). JAX runs reach 11 to 18 % for BERT on TPUs, and 50 to 70 % for language models with at least 16 billion
# parameters.
DEFAULT_MFU = 0.35
