"""Sizes of the shipped presets' base models, and what follows from them in parameters and bytes.

Figures are those of the published configurations; a local folder's own config.json is read instead.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from models.settings import Model, Parameters

TINY_VOCABULARY = 100
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama kind."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool
    """Whether the output layer shares the embedding's weights."""

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers of one block."""
        query, key_value = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key_value),
            "v_proj": (self.hidden, key_value),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def parameters(self) -> int:
        """Parameters without biases."""
        block = sum(inputs * outputs for inputs, outputs in self.linear_shapes().values()) + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * block + self.hidden

    def trained(self, parameters: Parameters) -> int:
        """Parameters that are trained."""
        if parameters.kind == "full":
            return self.parameters()
        shapes = self.linear_shapes()
        targets = [shapes[name] for name in parameters.target_modules if name in shapes]
        return self.layers * sum(parameters.rank * (inputs + outputs) for inputs, outputs in targets)

    def kv_bytes_per_token(self, bytes_each: int) -> int:
        """Bytes of key/value cache for one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * bytes_each


PUBLISHED = {
    "smol": Architecture(576, 30, 9, 3, 64, 1536, 49152, True),
    "meta-llama/Llama-3.2-1B": Architecture(2048, 16, 32, 8, 64, 8192, 128256, True),
    "Qwen/Qwen2.5-1.5B": Architecture(1536, 28, 12, 2, 128, 8960, 151936, True),
    "meta-llama/Llama-2-7b-hf": Architecture(4096, 32, 32, 32, 128, 11008, 32000, False),
    "meta-llama/Llama-3.1-8B": Architecture(4096, 32, 32, 8, 128, 14336, 128256, False),
}


def architecture(model: Model) -> Architecture | None:
    """The sizes of a run's base model; None where only the hub knows them."""
    if model.kind == "tiny":
        head = model.hidden_size // model.heads
        return Architecture(
            model.hidden_size,
            model.layers,
            model.heads,
            model.kv_heads,
            head,
            model.intermediate_size,
            TINY_VOCABULARY,
            True,
        )
    if model.name in PUBLISHED:
        return PUBLISHED[model.name]
    config = Path(model.name) / "config.json"
    if not config.is_file():
        return None
    values = json.loads(config.read_text(encoding="utf-8"))
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    return Architecture(
        hidden,
        values["num_hidden_layers"],
        heads,
        values.get("num_key_value_heads", heads),
        values.get("head_dim") or hidden // heads,
        values.get("intermediate_size", 4 * hidden),
        values["vocab_size"],
        values.get("tie_word_embeddings", True),
    )
