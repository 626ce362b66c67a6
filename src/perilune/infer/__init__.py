"""Running models: sampling (`sampler`), tokens (`generate`), text (`text`).

>>> from perilune.infer.text import stream_text
"""
