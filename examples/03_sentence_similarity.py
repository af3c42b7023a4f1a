"""Which sentences mean the same? A real model (MiniLM, 90 MB, fetched through npm), compiled once for every length.

input_ids: int64[batch_size, sequence_length]
attention_mask: int64[batch_size, sequence_length]
token_type_ids: int64[batch_size, sequence_length]
ran at (4, 19)
ran at (1, 10)
ran at (1, 11)
ran at (1, 9)
ran at (1, 19)
padded in a batch or alone, the vectors are the same: True
 1.00   0.68   0.00  -0.01   A cat sleeps on the warm sofa.
 0.68   1.00   0.10   0.06   The kitten is napping on the couch.
 0.00   0.10   1.00   0.42   Quarterly revenue rose by seven percent.
-0.01   0.06   0.42   1.00   The company's income grew in the last three months, the board announced yesterday.
"""

import re

import numpy as np

import relaxlite as rl
from relaxlite import models

SENTENCES = [
    "A cat sleeps on the warm sofa.",
    "The kitten is napping on the couch.",
    "Quarterly revenue rose by seven percent.",
    "The company's income grew in the last three months, the board announced yesterday.",
]

path = models.fetch("minilm-l6-onnx")
words = {word: k for k, word in enumerate(path.with_name("vocab.txt").read_text("utf-8").split("\n"))}


def tokenize(text: str) -> list[int]:
    """WordPiece: each word is cut into the longest pieces that the vocabulary has, from the left."""
    pieces = ["[CLS]"]
    for word in re.findall(r"\w+|[^\w\s]", text.lower()):
        prefix = ""
        while word:
            size = next(size for size in range(len(word), 0, -1) if prefix + word[:size] in words)
            pieces.append(prefix + word[:size])
            prefix, word = "##", word[size:]
    return [words[piece] for piece in [*pieces, "[SEP]"]]


def embed(texts: list[str]) -> np.ndarray:
    """One unit vector per text, (n, 384): the mean over the tokens that are no padding."""
    rows = [tokenize(text) for text in texts]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for k, row in enumerate(rows):
        ids[k, : len(row)], mask[k, : len(row)] = row, 1
    hidden = exe(input_ids=ids, attention_mask=mask, token_type_ids=np.zeros_like(ids))  # (n, length, 384)
    print(f"ran at {ids.shape}")
    mean = (hidden * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


exe = rl.compile(rl.from_onnx(path))
print(exe.inputs)

together = embed(SENTENCES)
alone = np.concatenate([embed([sentence]) for sentence in SENTENCES])
print(f"padded in a batch or alone, the vectors are the same: {np.allclose(together, alone, atol=1e-5)}")
for k, sentence in enumerate(SENTENCES):
    likeness = "  ".join(f"{value:5.2f}" for value in together[k] @ together.T)
    print(f"{likeness}   {sentence}")
