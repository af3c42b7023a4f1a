"""Architectures of language models, one file per family: how hyperparameters translate to a `DecoderConfig`.

Layers and file formats are shared. To add an architecture, write a file with an `Architecture` and list it in
ARCHITECTURES.
"""

from __future__ import annotations

from relaxlite.errors import ImportModelError
from relaxlite.frontend.llm.architectures.arcee import ARCEE
from relaxlite.frontend.llm.architectures.base import Architecture, Hyperparameters
from relaxlite.frontend.llm.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_LITE, YOUTU
from relaxlite.frontend.llm.architectures.ernie import ERNIE, ERNIE_MOE
from relaxlite.frontend.llm.architectures.exaone4 import EXAONE4
from relaxlite.frontend.llm.architectures.gemma import GEMMA, GEMMA2
from relaxlite.frontend.llm.architectures.gemma3 import GEMMA3
from relaxlite.frontend.llm.architectures.gemma4 import GEMMA4, GEMMA4_UNIFIED
from relaxlite.frontend.llm.architectures.glm import GLM, GLM4, GLM4_MOE
from relaxlite.frontend.llm.architectures.gpt_oss import GPT_OSS
from relaxlite.frontend.llm.architectures.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from relaxlite.frontend.llm.architectures.hunyuan import HUNYUAN
from relaxlite.frontend.llm.architectures.layer_normed import COHERE, COHERE2, GPT2, GPT_NEOX, PHI, STABLELM, STARCODER2
from relaxlite.frontend.llm.architectures.lfm2 import LFM2, LFM2_MOE
from relaxlite.frontend.llm.architectures.llama import LLAMA, MINISTRAL, MINISTRAL3, MISTRAL, SMOLLM3
from relaxlite.frontend.llm.architectures.mixtral import MIXTRAL
from relaxlite.frontend.llm.architectures.olmo import OLMO2, OLMO3, OLMOE
from relaxlite.frontend.llm.architectures.phi3 import PHI3
from relaxlite.frontend.llm.architectures.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from relaxlite.frontend.llm.architectures.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from relaxlite.frontend.llm.architectures.seed_oss import SEED_OSS

ARCHITECTURES: tuple[Architecture, ...] = (
    LLAMA, MISTRAL, SMOLLM3, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, GRANITE, OLMO2, OLMO3, MIXTRAL,
    QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITE_MOE, STARCODER2, PHI, STABLELM, GPT2, GPT_NEOX, COHERE, GPT_OSS,
    COHERE2, ERNIE, SEED_OSS, GLM, GLM4, HUNYUAN, EXAONE4, ARCEE, GRANITE_HYBRID,
    MINISTRAL, MINISTRAL3, LFM2, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, LFM2_MOE, ERNIE_MOE, GLM4_MOE,
    GEMMA4, GEMMA4_UNIFIED, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_LITE, YOUTU,
)  # fmt: skip


def find_architecture(name: str, source: str) -> Architecture:
    """Find an architecture by its name in a checkpoint. Raises ImportModelError, which lists known names."""
    for architecture in ARCHITECTURES:
        if name in architecture.names:
            return architecture
    known = ", ".join(name for architecture in ARCHITECTURES for name in architecture.names)
    raise ImportModelError(f"{source}: the architecture {name!r} is not known; known are {known}")


__all__ = ["ARCHITECTURES", "Architecture", "Hyperparameters", "find_architecture"]
