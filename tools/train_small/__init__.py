"""Train the small model that comes with the package.

python -m tools.train_small.prepare --texts simple_english.jsonl.gz --out packed.npz     texts -> vocabulary and packed tokens (CPU, once)
python -m tools.train_small.train --data packed.npz --out FOLDER --minutes 8             packed tokens -> GGUF, curve, numbers (one GPU)
"""
