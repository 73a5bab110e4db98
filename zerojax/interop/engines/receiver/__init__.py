"""Receives a training job's weights beside an inference engine. Needs Python 3.10 and NumPy.

The weights arrive as patches of pieces, which docs/engines.md specifies. This folder may be copied into the
engine's environment, without zerojax and JAX. ``python -m receiver`` then keeps a Hugging Face folder at the
job's weights.
"""
