"""How the shipped checkpoint is made: corpus, trainable model, training, evaluation.

Outside the installed package; run from the repository's root as ``python -m training.train``.
"""
