"""A small Llama with a tokenizer of common words, pre-trained on procedural demonstrations: a base without download.

It stands in for a pretrained model where there is none: it has read worked demonstrations of every suite, as a large
model has, before any expert is trained.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.artifacts import read_rows
from data.errors import UserError
from data.progress import Report
from data.seeds import derive_seed
from data.settings import Prompt
from data.suites import SUITES, Example
from models.requests import BaseRequest
from models.scoring import TokenRow
from models.settings import TinyLlama
from models.supervised import fit
from models.tokenization import encode_demonstration

CHARACTERS = "\n\t" + "".join(chr(code) for code in range(32, 127))
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s")
"""What may become one token: a word, a number or a run of signs, each with the space before it."""

COMMON = 0.003
"""Share of the documents in which a piece must stand to become a token (our choice: names and two-digit numbers do)."""
BUCKET = 16
"""Batches whose rows are sorted by length together (our choice: little padding, and still mixed lengths in time)."""

MICRO_BATCH_TOKENS = 8192
WEIGHT_DECAY = 0.01
RISE = 0.05
"""Share of the steps in which the learning rate rises (our choice)."""


def common_pieces(texts: Sequence[str]) -> list[str]:
    """Words, numbers and runs of signs of two characters or more that stand in a share COMMON of `texts`, sorted."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update({piece for piece in PIECE.findall(text) if len(piece) > 1})
    return sorted(piece for piece, count in counts.items() if count >= COMMON * len(texts))


def _whole(piece: str) -> str:
    """The regular expression of a piece where it stands alone: never within a longer word or number."""
    kind = "A-Za-z" if piece[-1].isalpha() else "0-9" if piece[-1].isdigit() else None
    if kind is None:
        return re.escape(piece)
    before = "" if piece.startswith(" ") else f"(?<![{kind}])"
    return f"{before}{re.escape(piece)}(?![{kind}])"


def word_tokenizer(pieces: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token for each of `pieces` where it stands alone, and for each printable ASCII character, newline and tab.

    So any ASCII text can be written; a word or number that is not among `pieces` is spelt. BOS stands in front of a
    text; other characters are <unk>.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS, *pieces])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = sorted(pieces, key=lambda piece: (-len(piece), piece))
    pattern = "|".join([*map(_whole, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def new_model(settings: TinyLlama, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of the settings' size with weights drawn from `seed`, float32, input and output embeddings shared.

    Raises UserError for sizes that do not go together.
    """
    if settings.hidden_size % settings.heads or settings.hidden_size // settings.heads % 2:
        raise UserError(
            f"model.hidden_size {settings.hidden_size} must be an even multiple of model.heads {settings.heads}"
        )
    if settings.heads % settings.kv_heads:
        raise UserError(f"model.heads {settings.heads} must be a multiple of model.kv_heads {settings.kv_heads}")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        initializer_range=settings.hidden_size**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed % 2**63)
        return LlamaForCausalLM(config).eval()


def documents(request: BaseRequest) -> list[tuple[Example, Prompt]]:
    """Demonstrations to pre-train on, each with its prompt: as many of every suite and of every difficulty.

    A suite gives its share of what the training steps use, rounded up; no question of the excluded tables is among
    them.
    """
    model = request.model
    excluded = {row["question"] for path in request.excluded for row in read_rows(path, "questions")}
    needed = -(-model.pretrain_steps * model.pretrain_batch // len(request.corpus))
    found = []
    for source, prompt in zip(request.corpus, request.prompts, strict=True):
        seed = derive_seed(request.seed, "pretraining", source.suite, source.seed)
        levels = model.pretrain_difficulties or (source.difficulty,)
        count = -(-min(needed, model.pretrain_documents) // len(levels))
        for level in levels:
            examples = SUITES[source.suite].examples(count, seed, level, excluding=excluded)
            found += [(example, prompt) for example in examples]
    return found


def encode(
    found: Sequence[tuple[Example, Prompt]], tokenizer: PreTrainedTokenizerFast, context: int
) -> tuple[list[TokenRow], int]:
    """The documents as rows, and how many were left out as longer than the context.

    The response is learned, the prompt only conditioned on: a procedural question is drawn at random, and what cannot
    be predicted would take most of a small model's gradient (our choice).
    """
    rows, left_out = [], 0
    for example, prompt in found:
        encoded = encode_demonstration(tokenizer, example.question, example.response, prompt)
        if len(encoded.prompt_ids) + len(encoded.response_ids) > context:
            left_out += 1
        else:
            rows.append(TokenRow(encoded.prompt_ids, encoded.response_ids))
    return rows, left_out


def check_corpus(request: BaseRequest) -> None:
    """Raises UserError where the corpus of a tiny model is missing, unknown or does not fit its prompts."""
    if not request.corpus:
        raise UserError("a tiny model needs a corpus to be pre-trained on: name procedural suites, or pretrain_steps 0")
    unknown = [source.suite for source in request.corpus if source.suite not in SUITES]
    if unknown:
        raise UserError(f"unknown suite {unknown[0]!r}; choose from {', '.join(sorted(SUITES))}")
    if len(request.corpus) != len(request.prompts):
        raise UserError(
            f"{len(request.corpus)} suites but {len(request.prompts)} prompts: give one prompt for each suite"
        )


def plan_batches(lengths: Sequence[int], steps: int, size: int, seed: int) -> list[list[int]]:
    """Indices of the documents of each step: pass after pass in a new order, batches of documents of like length."""
    batches: list[list[int]] = []
    number = 0
    while len(batches) < steps:
        generator = np.random.default_rng(derive_seed(seed, "pretraining order", number))
        order = generator.permutation(len(lengths)).tolist()
        made = []
        for start in range(0, len(order), BUCKET * size):
            bucket = sorted(order[start : start + BUCKET * size], key=lambda index: (lengths[index], index))
            made += [bucket[first : first + size] for first in range(0, len(bucket), size)]
        batches += [made[index] for index in generator.permutation(len(made))]
        number += 1
    return batches[:steps]


def pretrain(
    request: BaseRequest, device: torch.device, report: Report
) -> tuple[Any, Any, list[dict[str, Any]], dict[str, Any]]:
    """The pre-trained tiny model, its tokenizer, rows of the table `metrics`, and counts."""
    model_settings = request.model
    if model_settings.pretrain_steps:
        check_corpus(request)
    found = documents(request) if model_settings.pretrain_steps else []
    pieces = common_pieces([f"{example.question}\n{example.response}" for example, _ in found])
    tokenizer = word_tokenizer(sorted({*pieces, *request.pieces}))
    network = new_model(model_settings, tokenizer, derive_seed(request.seed, "initial weights"))
    network.to(device)
    figures: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "vocabulary": len(tokenizer),
    }
    if not found:
        return network, tokenizer, [], figures
    rows, left_out = encode(found, tokenizer, model_settings.context)
    if not rows:
        raise UserError(f"no document fits model.context {model_settings.context}; raise it or lower the difficulty")
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    plan = plan_batches(lengths, model_settings.pretrain_steps, model_settings.pretrain_batch, request.seed)
    figures |= {
        "documents": len(rows),
        "left_out": left_out,
        "processed_tokens": sum(lengths[index] for batch in plan for index in batch),
        "trained_tokens": sum(len(rows[index].completion_ids) for batch in plan for index in batch),
    }
    report.log(
        f"pre-training {figures['parameters']:,} parameters on {len(rows):,} documents, "
        f"{figures['trained_tokens']:,} tokens in {len(plan)} steps"
    )
    metrics = fit(
        network,
        [[rows[index] for index in batch] for batch in plan],
        learning_rate=model_settings.pretrain_learning_rate,
        schedule="cosine",
        warmup_ratio=RISE,
        weight_decay=WEIGHT_DECAY,
        max_gradient_norm=1.0,
        tokens_per_micro_batch=MICRO_BATCH_TOKENS,
        report=report,
        what="pre-training",
    )
    return network.cpu(), tokenizer, metrics, figures
