"""A random two-layer Llama and a character tokenizer, built in memory."""

import string


def character_tokenizer():
    """A fast tokenizer with one token per printable character, BOS 1 in front of a text, EOS 2, PAD 0, UNK 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = "".join(sorted(set(string.printable) - set("\r\x0b\x0c")))
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for character in characters:
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def tiny_llama(seed: int = 0, vocabulary: int = 128, hidden: int = 32, layers: int = 2, context: int = 256):
    """A random Llama in float32, evaluation mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def save_base(folder, model=None, tokenizer=None):
    """Writes `model` and `tokenizer` as a base folder (as models.base:prepare makes it) and returns the folder."""
    import json

    model = model if model is not None else tiny_llama()
    (folder / "model").mkdir(parents=True)
    model.save_pretrained(folder / "model")
    (tokenizer or character_tokenizer()).save_pretrained(folder / "model")
    base = {"kind": "tiny", "name": "model", "revision": None, "dtype": "float32", "context": None}
    (folder / "base.json").write_text(json.dumps(base))
    return folder
