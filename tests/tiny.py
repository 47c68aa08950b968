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


def bpe_tokenizer(vocabulary: int = 400):
    """A byte-level BPE tokenizer of GPT-2's kind, trained in memory: it merges newlines and spaces; EOS 0, no BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = ["def solution():\n    apples = 12\n    total = apples + 30\n    return total\n\n\n", "The answer is 42 .  "]
    tokenizer.train_from_iterator(text * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def tiny_gpt2(seed: int = 0, vocabulary: int = 128, context: int = 256):
    """A random GPT-2 (learned positions) in float32, evaluation mode."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=4, n_positions=context, bos_token_id=1, eos_token_id=2
    )
    model = GPT2LMHeadModel(config).eval()
    # As drawn, positions hardly matter; a model that has learned them reads them loudly.
    torch.nn.init.normal_(model.transformer.wpe.weight, std=1.0)
    return model


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
