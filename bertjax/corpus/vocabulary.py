"""Training a vocabulary."""


def train_vocabulary(*a, **k):
    raise NotImplementedError
