"""The same training run written a second time, as plainly as possible: one process, dense, float64, no shared code.

Everything that runs on a mesh is judged against this folder. It imports numpy and torch and nothing of the project.

    rng.py    numbers that are a function of (key, index)
    data.py   packed rows and their order
    ffn.py    the feed-forward networks, dense or a mixture of experts
    model.py  the decoder, as a function of a dict of weights
    loop.py   training, evaluation, and the bigram model that any training should beat
"""
