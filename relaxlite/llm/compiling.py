"""Compilation of a checkpoint to a language model. Imports the compiler."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
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
from relaxlite.ir.symbolic import sym
from relaxlite.llm.description import DESCRIPTION, TOKENIZER, Description
from relaxlite.llm.drafts import ROW_COST
from relaxlite.llm.model import LanguageModel
from relaxlite.llm.step_samples import step_samples
from relaxlite.llm.tokenizer import Tokenizer
from relaxlite.passes.context import PassContext
from relaxlite.passes.graph.integer_products import blocked_contraction, relaxed_rotation
from relaxlite.passes.products.contraction import Contraction, Encoding
from relaxlite.passes.products.strategy import Precision, Strategy, allowed_of, candidates
from relaxlite.passes.products.strategy_table import REQUESTED_BLOCKS, ROUNDED_BLOCKS, TABLE, WINOGRAD_INT16_KEPT
from relaxlite.runtime.executable import ExecutableData
from relaxlite.target import Target

MIN_RELAXED_SHARE = (
    1 / 8
)  # least share of weights in relaxed precision that is worth a fill function: more than a router


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

    `max_context`: the maximum number of tokens of a sequence, by default the model's own; a model with another rotary
    embedding beyond the context of its training (Phi-3) is compiled for that context by default. `cache_dtype`: type of
    the KV cache, "float32", "float16" or "int8"; by default float16 if products in integers round more than that does
    and the processor converts it, else float32. `quantize`: block format for the matrices of a float checkpoint,
    "q4_0", "q4_1", "q5_0", "q5_1" or "q8_0"; embeddings become q8_0, also if they are the only floats. `precision`: as
    in `relaxlite.compile`; "int8" rounds the activations of quantized weights as llama.cpp does, the default to 12
    bits. In prefill, where a token only fills the cache, both round activations to 8 bits, and operands of products
    with float weights to 14 bits where that is faster (frontend/llm/step.py); "float32" rounds nothing.

    Raises ImportModelError for a checkpoint that cannot be read, has no tokenizer or is quantized already,
    InvalidArgumentError for a context beyond the model's or an unknown option, and the errors of `relaxlite.compile`.
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
    """Compile like `compile`, to plain data, also for another processor.

    `progress` is called with the name of each matrix that is quantized. `precision`, `context`, `validate`: as in
    `relaxlite.compile`; validation runs steps over a cache.
    """
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
    """Compile like `build`, from a checkpoint in memory."""
    attachments = make_attachments(checkpoint, max_context)  # fails, if at all, before anything takes long
    if quantize is not None:
        checkpoint = quantize_checkpoint(checkpoint, quantize, progress=progress)
        attachments = make_attachments(checkpoint, max_context)  # with the quantization in the provenance
    machine = Target.parse(target) if isinstance(target, str) else target
    resolved_precision = precision or (PassContext(machine) if context is None else context).precision
    if cache_dtype is None:
        has_integer_products = any(
            _uses_integers(weight, machine, resolved_precision) for weight in checkpoint.weights.values()
        )
        cache_dtype = "float16" if has_integer_products and machine.has_fp16_conversion else "float32"
    multiplied = {name: weight for name, weight in checkpoint.weights.items() if name != "layer_embed"}
    relaxed = [weight for weight in multiplied.values() if _allows_relaxed(weight, machine, resolved_precision)]
    grouped = _matrices_named(checkpoint, ".experts.") or _matrices_named(checkpoint, ".latent_")
    module = build_step_module(
        checkpoint,
        max_context=max_context,
        cache_dtype=cache_dtype,
        has_fill=_elements(relaxed) >= MIN_RELAXED_SHARE * _elements(multiplied.values())
        or _shares_last_kv(checkpoint),
        groups_rows=all(_uses_integers(weight, machine, resolved_precision) for weight in grouped),
    )
    samples = step_samples(module) if validate else False
    data = build_module(module, target, context=context, precision=precision, validate=samples)
    provenance = {**data.metadata.provenance, **checkpoint.provenance}
    return replace(data, attachments=attachments, metadata=replace(data.metadata, provenance=provenance))


def build_step_module(
    checkpoint: Checkpoint, *, max_context: int | None = None, cache_dtype: str = "float32", has_fill: bool = False,
    groups_rows: bool = False,
) -> IRModule:  # fmt: skip
    """Build the module that is compiled: a step over the cache and, with `has_fill`, one that only fills it."""
    config = replace(checkpoint.config, context=_context(checkpoint, max_context))
    checkpoint = replace(checkpoint, config=config)
    return build_step(checkpoint, cache_dtype=cache_dtype, has_fill=has_fill, groups_rows=groups_rows)


def _matrices_named(checkpoint: Checkpoint, kind: str) -> list[Weight]:
    """Return the matrices whose names contain `kind`."""
    return [weight for name, weight in checkpoint.weights.items() if kind in name and len(weight.shape) == 2]


def _shares_last_kv(checkpoint: Checkpoint) -> bool:
    """Return whether the last layers cache nothing, so that a fill function computes less."""
    last = checkpoint.config.layers - 1
    return checkpoint.config.kv_layer_of(last) != last


def _elements(weights: Iterable[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)


def _allows_relaxed(weight: Weight, target: Target, precision: str) -> bool:
    """Return whether products with a weight are rounded more in relaxed precision."""
    row = _first_row(weight)
    if row is not None:
        return relaxed_rotation(row.coding, row.group, target, precision) > 1
    return WINOGRAD_INT16_KEPT in _strategies(weight, target, Precision(precision, is_relaxed=True))


def _uses_integers(weight: Weight, target: Target, precision: str) -> bool:
    """Return whether products with a weight in blocks are computed in integers."""
    strategies = _strategies(weight, target, Precision(precision))
    return any(strategy in strategies for strategy in (ROUNDED_BLOCKS, REQUESTED_BLOCKS))


def _strategies(weight: Weight, target: Target, precision: Precision) -> Sequence[Strategy]:
    """Return the strategies that products with a weight may take; none: it has floats and is no matrix."""
    row, shape = _first_row(weight), weight.shape
    if row is None and len(shape) != 2:
        return ()
    columns, depth, floats = math.prod(shape[:-1]), shape[-1], Encoding.of_dtype("float32")
    contraction = (
        Contraction("matmul", None, sym(columns), sym(depth), floats, floats, is_constant=True)
        if row is None
        else blocked_contraction(row.coding, row.group, depth, columns)
    )
    return allowed_of(candidates(TABLE, contraction, target, precision))


def _first_row(weight: Weight) -> GroupedWeight | None:
    """Return the first row of a blocked weight; None for floats."""
    return None if weight.block_format is None else weight.grouped(slice(0, 1))


def _context(checkpoint: Checkpoint, max_context: int | None) -> int:
    """Return the maximum number of tokens of a sequence. Raises InvalidArgumentError beyond the model's own."""
    model_context = checkpoint.config.context
    is_number = isinstance(max_context, Integral) and not isinstance(max_context, bool)
    if max_context is not None and not (is_number and 1 <= max_context <= model_context):
        raise InvalidArgumentError(f"max_context must be from 1 to the model's own {model_context}, got {max_context}")
    return int(max_context or checkpoint.config.default_context or model_context)


def _row_cost(checkpoint: Checkpoint) -> float:
    """Estimate the time of one more token in a step, in steps of one token.

    The token reads the weights of the experts that no other token chose.
    """
    experts = checkpoint.config.experts
    if experts is None:
        return ROW_COST
    share = experts.top_k / experts.count
    expert_bytes = share * sum(weight.nbytes for name, weight in checkpoint.weights.items() if ".experts." in name)
    other_bytes = sum(weight.nbytes for name, weight in checkpoint.weights.items() if ".experts." not in name)
    return ROW_COST + (1 - ROW_COST) * (1 - share) * expert_bytes / (expert_bytes + other_bytes)


def make_attachments(checkpoint: Checkpoint, max_context: int | None = None) -> dict[str, bytes]:
    """Make the attachments of an artifact (llm/description.py). Raises ImportModelError without a valid tokenizer."""
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
        stop=tuple(
            token for token in tokenizer.stop if 0 <= token < config.vocab
        ),  # transformers' default token may be outside of the vocabulary
        special_tokens=dict(tokenizer.special_tokens),
        chat_template=tokenizer.chat_template,
        other_templates=dict(tokenizer.other_templates),
        generation=dict(checkpoint.generation),
        provenance=dict(checkpoint.provenance),
        row_cost=_row_cost(checkpoint),
    )
    return {DESCRIPTION: description.to_json(), TOKENIZER: tokenizer.json.encode()}
