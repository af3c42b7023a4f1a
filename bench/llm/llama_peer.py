"""llama.cpp through llama-cpp-python's bindings of its C API: no sampling in Python, logits for last tokens only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from bench.llm.peers import Array, Peer, Tokens, Unsupported

SMALL_STACK = 4096  # bytes: enough for signals of a process without tiles, too little for those of one with tiles
BATCH = 512  # n_batch and n_ubatch
CONTEXT_STEP = 256  # a context's length is a multiple of it


class LlamaCpp(Peer):
    """Weights mapped, repacked where llama.cpp has a better layout for this processor, which is its default."""

    flash_attention: ClassVar[bool] = False
    fallback = "without AMX tiles"

    def version(self) -> str:
        if self.is_fallback:
            self._refuse_tiles()
        import llama_cpp

        self.api: Any = llama_cpp
        self.log: list[str] = []

        @llama_cpp.llama_log_callback
        def keep(level: int, text: bytes, data: Any) -> None:
            self.log.append(text.decode("utf-8", "replace"))

        self._callback = keep  # which llama.cpp holds a pointer to
        llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        return f"{llama_cpp.__version__} (llama-cpp-python)"

    def _refuse_tiles(self) -> None:
        """Make Linux refuse AMX to this process, so that llama.cpp repacks weights as it does on other processors.

        GCC before 13 may drop most of the tiles' configuration (llama.cpp's issue 20824), and such a build does not say
        that it is broken: the instruction ends the process. The permission to use tiles is denied to a process whose
        alternate signal stack is too small to hold them.
        """
        self._stack = ctypes.create_string_buffer(SMALL_STACK)
        given = _SignalStack(ctypes.addressof(self._stack), 0, SMALL_STACK)
        if ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(given), None) != 0:
            raise Unsupported(f"no alternate signal stack: {os.strerror(ctypes.get_errno())}")

    def open(self, path: str, sequences: int, length: int) -> None:
        params = self.api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.load_mode = self.api.LLAMA_LOAD_MODE_MMAP
        self.model = self.api.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise Unsupported(f"it does not load {path}: {self._complaints()}")
        self.vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.make_room(sequences, length)

    def make_room(self, sequences: int, length: int) -> None:
        if self.context is not None:
            self.api.llama_free(self.context)
        params = self.api.llama_context_default_params()
        params.n_ctx = sequences * -(-length // CONTEXT_STEP) * CONTEXT_STEP
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = (
            self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED if self.flash_attention else self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.no_perf = True
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.context:
            raise Unsupported(f"it makes no context of {params.n_ctx} tokens: {self._complaints()}")
        self.memory = self.api.llama_get_memory(self.context)
        self.batch = _Batch(self.api, sequences)
        self.lengths: list[int] = []
        self.row: Array = np.zeros(0, np.float32)

    def start(self, prompts: Sequence[Tokens]) -> list[int]:
        self.api.llama_memory_clear(self.memory, False)
        self.lengths = [0] * len(prompts)
        found = []
        for sequence, tokens in enumerate(prompts):
            for first in range(0, len(tokens), BATCH):
                part = tokens[first : first + BATCH]
                self.batch.set_part(sequence, first, part, has_logits=first + len(part) == len(tokens))
                self._decode()
            self.lengths[sequence] = len(tokens)
            found.append(self._likeliest(-1))
        return found

    def step(self, tokens: Tokens) -> list[int]:
        self.batch.set_step(self.lengths, tokens)
        self._decode()
        self.lengths = [length + 1 for length in self.lengths]
        return [self._likeliest(k) for k in range(len(tokens))]

    def _decode(self) -> None:
        status = self.api.llama_decode(self.context, self.batch.struct)
        if status != 0:
            raise RuntimeError(f"llama_decode of {self.batch.struct.n_tokens} tokens says {status}")

    def _likeliest(self, index: int) -> int:
        pointer = self.api.llama_get_logits_ith(self.context, index)
        self.row = np.ctypeslib.as_array(pointer, (self.vocab,))
        return int(self.row.argmax())

    def rewind(self, length: int) -> None:
        for sequence in range(len(self.lengths)):
            if not self.api.llama_memory_seq_rm(self.memory, sequence, length, -1):
                raise RuntimeError(f"llama.cpp cannot take sequence {sequence} back to {length} tokens")
        self.lengths = [length] * len(self.lengths)

    def logits(self) -> Array:
        return self.row.copy()

    def facts(self) -> dict[str, Any]:
        said = [line.strip() for line in "".join(self.log).splitlines()]
        return {
            "cache_dtype": "float16",
            "flash_attention": self.flash_attention,
            "system": self.api.llama_print_system_info().decode(),
            "buffers": [line for line in said if "buffer size" in line],
        }

    def _complaints(self) -> str:
        return " ".join(text.strip() for text in self.log[-3:])


class LlamaCppFlash(LlamaCpp):
    flash_attention = True


class _SignalStack(ctypes.Structure):
    """stack_t of Linux."""

    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


class _Batch:
    """A llama_batch whose arrays are NumPy's."""

    def __init__(self, api: Any, sequences: int) -> None:
        self.token, self.pos = np.zeros(BATCH, np.int32), np.zeros(BATCH, np.int32)
        self.counts, self.wanted = np.ones(BATCH, np.int32), np.zeros(BATCH, np.int8)
        ids = [ctypes.c_int32(k) for k in range(sequences)]
        row = ctypes.POINTER(ctypes.c_int32) * BATCH
        self._same = [row(*([ctypes.pointer(one)] * BATCH)) for one in ids]  # every token of one sequence
        self._each = row(*(ctypes.pointer(one) for one in ids))  # a token of each
        self.struct = api.llama_batch(
            n_tokens=0,
            token=self.token.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            pos=self.pos.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self.counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            logits=self.wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def set_part(self, sequence: int, first: int, tokens: Tokens, *, has_logits: bool) -> None:
        """Tokens of one sequence from a position on."""
        count = len(tokens)
        self.token[:count] = tokens
        self.pos[:count] = np.arange(first, first + count)
        self.wanted[:count] = 0
        self.wanted[count - 1] = has_logits
        self.struct.n_tokens, self.struct.seq_id = count, self._same[sequence]

    def set_step(self, lengths: Sequence[int], tokens: Tokens) -> None:
        """One token of each sequence."""
        count = len(tokens)
        self.token[:count], self.pos[:count], self.wanted[:count] = tokens, lengths, 1
        self.struct.n_tokens, self.struct.seq_id = count, self._each
