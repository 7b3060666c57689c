"""Tasks with known answers for small models: what `ds4jax eval` asks, and what the small model was trained to do.

words: what tasks are made of. dialogues: conversations made by rule, from a seed. texts: the held-out texts. run: ask an engine many
things at once. measures: judge the replies. report: all measures of one model.
"""
