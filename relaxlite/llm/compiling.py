"""From a checkpoint to a language model that runs. Imports the compiler."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from numbers import Integral

from relaxlite.driver import build as build_module
from relaxlite.errors import ArtifactError, ImportModelError, InvalidArgumentError
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight
from relaxlite.frontend.llm.quantize import quantize_checkpoint
from relaxlite.frontend.llm.quantized import GroupedWeight
from relaxlite.frontend.llm.read import read_checkpoint
from relaxlite.frontend.llm.step import build_step
from relaxlite.ir.module import IRModule
from relaxlite.llm.description import DESCRIPTION, TOKENIZER, Description
from relaxlite.llm.drafts import ROW_COST
from relaxlite.llm.model import LanguageModel
from relaxlite.llm.step_samples import step_samples
from relaxlite.llm.tokenizer import Tokenizer
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.integer_products import relaxed_rotation, uses_integer_products
from relaxlite.passes.products.int16_products import are_int16
from relaxlite.runtime.executable import ExecutableData
from relaxlite.target import Target

MIN_COARSE = 1 / 8  # of a checkpoint's weights, for a function of its own that rounds more: a router alone is none


def compile(
    path: str | os.PathLike[str],
    target: str | Target = "llvm",
    *,
    max_context: int | None = None,
    cache_dtype: str | None = None,
    quantize: str | None = None,
    precision: str | None = None,
    threads: int | None = None,
) -> LanguageModel:
    """Compile a GGUF file or a Hugging Face folder for a target, by default this processor.

    `max_context`: how many tokens a sequence may have, where less than the model's own will do; a model whose rotary
    embedding is another one beyond the context of its training (Phi-3) is compiled for that context unless more is
    said. `cache_dtype`: how keys and values are kept, "float32", "float16" or "int8"; by default float16 where products
    in integers round more than that does and the processor converts it, else float32. `quantize`: of a checkpoint in
    floats, how its matrices are kept, "q4_0", "q4_1", "q5_0", "q5_1" or "q8_0"; embeddings as q8_0, also where they
    alone are floats. `precision`: as in `relaxlite.compile`; "int8" rounds what quantized weights are multiplied by as
    llama.cpp does, the default to 12 bits. Of long prompts, where only the cache needs it, either rounds that to 8, and
    products with weights in floats to 14, where that is faster (frontend/llm/step.py); "float32" rounds nothing.
    Raises ImportModelError for a checkpoint that cannot be read, has no tokenizer or is quantized already,
    InvalidArgumentError for a context beyond the model's or an unknown kind, and what `relaxlite.compile` raises.
    """
    data = build(path, target, max_context=max_context, cache_dtype=cache_dtype, quantize=quantize, precision=precision)
    return LanguageModel.of(data, threads=threads)


def build(
    path: str | os.PathLike[str],
    target: str | Target = "llvm",
    *,
    max_context: int | None = None,
    cache_dtype: str | None = None,
    quantize: str | None = None,
    precision: str | None = None,
    progress: Callable[[str], None] = lambda name: None,
    context: PassContext | None = None,
    validate: bool = False,
) -> ExecutableData:
    """What `compile` makes, as plain data: also for a processor that is not this one. `progress` is told each matrix
    that is quantized. `precision`, `context`, `validate`: as in `relaxlite.compile`, on steps of a cache."""
    return build_checkpoint(
        read_checkpoint(path),
        target,
        max_context=max_context,
        cache_dtype=cache_dtype,
        quantize=quantize,
        precision=precision,
        progress=progress,
        context=context,
        validate=validate,
    )


def build_checkpoint(
    checkpoint: Checkpoint,
    target: str | Target = "llvm",
    *,
    max_context: int | None = None,
    cache_dtype: str | None = None,
    quantize: str | None = None,
    precision: str | None = None,
    progress: Callable[[str], None] = lambda name: None,
    context: PassContext | None = None,
    validate: bool = False,
) -> ExecutableData:
    """As `build`, of a checkpoint in memory."""
    attachments = attachments_of(checkpoint, max_context)  # refused, where it is, before anything takes long
    if quantize is not None:
        checkpoint = quantize_checkpoint(checkpoint, quantize, progress=progress)
        attachments = attachments_of(checkpoint, max_context)  # which now say so
    machine = Target.parse(target) if isinstance(target, str) else target
    chosen = precision or (PassContext(machine) if context is None else context).precision
    if cache_dtype is None:
        rounds = any(_is_integer(weight, machine, chosen) for weight in checkpoint.weights.values())
        cache_dtype = "float16" if rounds and machine.has_fp16_conversion else "float32"
    multiplied = {name: weight for name, weight in checkpoint.weights.items() if name != "layer_embed"}
    coarse = [weight for weight in multiplied.values() if _is_coarse(weight, machine, chosen)]
    grouped = _matrices(checkpoint, ".experts.") or _matrices(checkpoint, ".latent_")
    module = module_of(
        checkpoint,
        max_context=max_context,
        cache_dtype=cache_dtype,
        has_fill=_elements(coarse) >= MIN_COARSE * _elements(multiplied.values()) or _ends_without_keys(checkpoint),
        groups_rows=all(_is_integer(weight, machine, chosen) for weight in grouped),
    )
    samples = step_samples(module) if validate else False
    data = build_module(module, target, context=context, precision=precision, validate=samples)
    provenance = {**data.metadata.provenance, **checkpoint.provenance}
    return replace(data, attachments=attachments, metadata=replace(data.metadata, provenance=provenance))


def module_of(
    checkpoint: Checkpoint, *, max_context: int | None = None, cache_dtype: str = "float32", has_fill: bool = False,
    groups_rows: bool = False,
) -> IRModule:  # fmt: skip
    """The module that is compiled: a step of any number of tokens over the cache, and perhaps one that fills it."""
    config = replace(checkpoint.config, context=_context(checkpoint, max_context))
    checkpoint = replace(checkpoint, config=config)
    return build_step(checkpoint, cache_dtype=cache_dtype, has_fill=has_fill, groups_rows=groups_rows)


def _matrices(checkpoint: Checkpoint, kind: str) -> list[Weight]:
    return [weight for name, weight in checkpoint.weights.items() if kind in name and len(weight.shape) == 2]


def _ends_without_keys(checkpoint: Checkpoint) -> bool:
    """Whether the last layers keep nothing, so that what only fills the cache computes less."""
    last = checkpoint.config.layers - 1
    return checkpoint.config.keys_from(last) != last


def _elements(weights: Iterable[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)


def _is_coarse(weight: Weight, target: Target, precision: str) -> bool:
    """Whether what it is multiplied by is rounded more where the step says that it may be."""
    some = _in_blocks(weight)
    if some is None:
        return len(weight.shape) == 2 and are_int16(target, precision, *reversed(weight.shape))
    return relaxed_rotation(some.coding, some.group, target, precision) > 1


def _is_integer(weight: Weight, target: Target, precision: str) -> bool:
    """Whether it is multiplied in integers."""
    some = _in_blocks(weight)
    return some is not None and uses_integer_products(some.coding, some.group, target, precision)


def _in_blocks(weight: Weight) -> GroupedWeight | None:
    """A row of it; None: its numbers lie in no blocks."""
    return None if weight.block_format is None else weight.grouped(slice(0, 1))


def _context(checkpoint: Checkpoint, max_context: int | None) -> int:
    most = checkpoint.config.context
    is_number = isinstance(max_context, Integral) and not isinstance(max_context, bool)
    if max_context is not None and not (is_number and 1 <= max_context <= most):
        raise InvalidArgumentError(f"max_context must be from 1 to the model's own {most}, got {max_context}")
    return int(max_context or checkpoint.config.usual_context or most)


def _row_cost(checkpoint: Checkpoint) -> float:
    """Of one more token in a step: it reads the experts that it chose, where nobody else chose them."""
    experts = checkpoint.config.experts
    if experts is None:
        return ROW_COST
    share = experts.chosen / experts.count
    chosen = share * sum(weight.nbytes for name, weight in checkpoint.weights.items() if ".experts." in name)
    others = sum(weight.nbytes for name, weight in checkpoint.weights.items() if ".experts." not in name)
    return ROW_COST + (1 - ROW_COST) * (1 - share) * chosen / (chosen + others)


def attachments_of(checkpoint: Checkpoint, max_context: int | None = None) -> dict[str, bytes]:
    """What an artifact says of a checkpoint beside its code; see llm/description.py."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    source = checkpoint.provenance.get("source", "the checkpoint")
    if tokenizer is None:
        raise ImportModelError(
            f"{source}: there is no tokenizer; a folder needs tokenizer.json beside config.json (transformers makes "
            "one: `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`), a GGUF file `tokenizer.ggml.*`"
        )
    try:
        Tokenizer(tokenizer.json).check()
    except ArtifactError as error:
        raise ImportModelError(f"{source}: {error}") from error
    description = Description(
        architecture=config.architecture,
        vocab=config.vocab,
        context=_context(checkpoint, max_context),
        bos=tokenizer.bos,
        adds_bos=tokenizer.adds_bos,
        stop=tuple(token for token in tokenizer.stop if 0 <= token < config.vocab),  # config.json's default may be more
        special_tokens=dict(tokenizer.special_tokens),
        chat_template=tokenizer.chat_template,
        other_templates=dict(tokenizer.other_templates),
        generation=dict(checkpoint.generation),
        provenance=dict(checkpoint.provenance),
        row_cost=_row_cost(checkpoint),
    )
    return {DESCRIPTION: description.to_json(), TOKENIZER: tokenizer.json.encode()}
