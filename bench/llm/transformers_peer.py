"""transformers on PyTorch: the file's weights, dequantized to float32 by transformers itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bench.llm.peers import Array, Peer, Tokens


class Transformers(Peer):
    """Attention is PyTorch's own fused one, which is transformers' default."""

    def version(self) -> str:
        import torch
        import transformers

        self.torch: Any = torch
        self.library: Any = transformers
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(self.threads)
        return f"{transformers.__version__}, torch {torch.__version__}"

    def open(self, path: str, sequences: int, length: int) -> None:
        folder, name = os.path.split(path)
        make = self.library.AutoModelForCausalLM.from_pretrained
        self.model: Any = make(folder, gguf_file=name, dtype=self.torch.float32, local_files_only=True).eval()
        self.cache: Any = None
        self.last: Any = None

    def make_room(self, sequences: int, length: int) -> None:
        """The cache grows as it is needed."""

    def start(self, prompts: Sequence[Tokens]) -> list[int]:
        self.cache = self.library.DynamicCache(config=self.model.config)
        return self._forward([list(tokens) for tokens in prompts])

    def step(self, tokens: Tokens) -> list[int]:
        return self._forward([[token] for token in tokens])

    def _forward(self, rows: list[list[int]]) -> list[int]:
        with self.torch.inference_mode():
            made = self.model(self.torch.tensor(rows), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.last = made.logits[:, -1]  # (sequences, vocab)
            found: list[int] = self.last.argmax(-1).tolist()
        return found

    def rewind(self, length: int) -> None:
        self.cache.crop(length - self.cache.get_seq_length())  # negative: how many to forget

    def logits(self) -> Array:
        made: Array = self.last[-1].numpy().copy()
        return made

    def facts(self) -> dict[str, Any]:
        return {"cache_dtype": "float32"}
