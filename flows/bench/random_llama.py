"""A tiny random model as a Hugging Face folder: real files, real tokenizer, loaded in milliseconds.

Its weights are random but scaled so that logits differ clearly from one another: greedy answers are then the
same under any order of summation, which a test of token equality needs.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_COMMON_WORDS = """
the of and to in is that it for was on are as with they be at one have this from or had by hot but
some what there we can out other were all your when up use word how said an each she which do their
time if will way about many then them would write like so these her long make thing see him two has
look more day could go question answer please summarise label text table number report system user
assistant
"""

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_random_llama(
    folder: Path,
    *,
    vocab_size: int = 1024,
    hidden_size: int = 64,
    tokenizer: bool = True,
    seed: int = 0,
    model_type: str = "llama",
    tie_word_embeddings: bool = False,
    max_model_len: int = 4096,
    rope_parameters: dict[str, object] | None = None,
) -> Path:
    """Writes config, safetensors and (by default) a trained byte-level BPE tokenizer with a ChatML template.

    Args:
        folder: made if missing; files in it are overwritten.
        vocab_size: rows of the embedding; the tokenizer uses all of them up to about 3,000.
        hidden_size: numbers that stand for a token; the inner layers have twice as many.
        tokenizer: False leaves the tokenizer files out.
        seed: of the weights. The tokenizer is the same for every seed.
        model_type: `llama`, `qwen2` (biased qkv) or `qwen3` (normalised q and k).
        tie_word_embeddings: the output head is the embedding.
        max_model_len: positions.
        rope_parameters: put into the config as they are, in place of plain rotary embeddings.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    if model_type != "llama":
        config["use_sliding_window"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        _write_tokenizer(folder, vocab_size)
    return folder


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of the architecture under its Hugging Face name."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head = (
        int(config["hidden_size"]),
        int(config["intermediate_size"]),
        int(config["head_dim"]),
    )
    q_size, kv_size = int(config["num_attention_heads"]) * head, int(config["num_key_value_heads"]) * head

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * float(gain * columns**-0.5)

    def gains(size: int) -> torch.Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(int(config["vocab_size"]), hidden, gain=2.0)}
    for layer in range(int(config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}."
        weights[prefix + "input_layernorm.weight"] = gains(hidden)
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, hidden, gain=2.0)
            if config["model_type"] == "qwen2":
                weights[f"{prefix}self_attn.{name}_proj.bias"] = torch.randn(rows, generator=generator) * 0.2
            if config["model_type"] == "qwen3" and name != "v":
                weights[f"{prefix}self_attn.{name}_norm.weight"] = gains(head)
        weights[prefix + "self_attn.o_proj.weight"] = matrix(hidden, q_size, gain=2.0)
        weights[prefix + "post_attention_layernorm.weight"] = gains(hidden)
        weights[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden, gain=2.0)
        weights[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden, gain=2.0)
        weights[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner)
    weights["model.norm.weight"] = gains(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(int(config["vocab_size"]), hidden, gain=2.0)
    return weights


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _corpus() -> list[str]:
    """Sentences of common words and of made-up ones, enough of them to fill the vocabulary."""
    rng = random.Random(0)
    common = _COMMON_WORDS.split()
    syllables = [
        a + b
        for a in ("b", "d", "f", "k", "l", "m", "n", "r", "s", "t", "v", "z", "pr", "st")
        for b in "aeiou"
    ]
    made_up = ["".join(rng.choices(syllables, k=rng.randint(2, 3))) for _ in range(1500)]
    words = common * 8 + made_up
    sentences = [" ".join(rng.choices(words, k=12)).capitalize() + "." for _ in range(3000)]
    return [*sentences, *(f"{a} + {b} = {a + b}" for a in range(20) for b in range(20))]
