"""A GGUF file of the Llama architecture as a Hugging Face folder, its weights dequantised to bfloat16.

The folder gets `config.json`, `generation_config.json`, `model.safetensors`, `tokenizer.json` and
`tokenizer_config.json` with the chat template.
"""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from blend_core.errors import ConfigurationError

_SPECIAL_TOKEN_TYPES: Final = (3, 4)
"""GGUF token types: control and user-defined."""

_PRE_TOKENIZERS_WITH_SINGLE_DIGITS: Final = ("smollm",)

_OUTER_TENSORS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Writes the Hugging Face folder of a GGUF file.

    Args:
        gguf_file: a model of the Llama architecture with a byte-level BPE tokenizer.
        folder: an existing folder; files of the same names are replaced.

    Raises:
        ConfigurationError: the `gguf` package is missing, or the file holds another kind of model.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigurationError(
            "Reading a GGUF file needs the gguf package: pip install 'blendserve[torch]'."
        ) from error
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.model") != "gpt2":
        raise ConfigurationError(
            f"{gguf_file.name} is no Llama model with a byte-level BPE tokenizer; "
            "add a Hugging Face folder instead."
        )
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    _write_weights(reader.tensors, fields, folder / "model.safetensors")
    _write_json(folder / "config.json", _config(fields, tied))
    _write_json(folder / "generation_config.json", _token_ids(fields))
    _write_tokenizer(fields, folder)


def hugging_face_rope_rows(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order of the query and key weights.

    llama.cpp keeps the two elements that a rotation mixes next to each other (`2 i`, `2 i + 1`);
    Hugging Face keeps them half a head apart (`i`, `i + head_size / 2`).

    Args:
        weight: `(num_heads * head_size, hidden_size)`.
        num_heads: query heads, or key/value heads for the key weight.
    """
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bit patterns of finite float32 values rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounding = 0x7FFF + ((bits >> 16) & 1)
    return ((bits + rounding) >> 16).astype(np.uint16)


def _write_weights(tensors: Any, fields: dict[str, Any], file: Path) -> None:
    from gguf.quants import dequantize

    heads = {"attn_q.weight": fields["llama.attention.head_count"], "attn_k.weight": _num_kv_heads(fields)}
    weights: dict[str, npt.NDArray[np.uint16]] = {}
    for tensor in tensors:
        name, part = _hugging_face_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            weight = hugging_face_rope_rows(weight, heads[part])
        weights[name] = bfloat16_bits(weight)
    _write_safetensors(weights, file)


def _write_safetensors(weights: dict[str, npt.NDArray[np.uint16]], file: Path) -> None:
    # Written by hand because numpy has no bfloat16 to hand over: header length, JSON header, raw tensors.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, bits in weights.items():
        header[name] = {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [end, end + bits.nbytes]}
        end += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8 bytes
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for bits in weights.values():
            opened.write(bits.tobytes())


def _hugging_face_name(name: str) -> tuple[str, str]:
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name], name
    block, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in _LAYER_TENSORS:
        raise ConfigurationError(f"The GGUF file has a tensor {name} that a Llama model does not have.")
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}", part


def _num_kv_heads(fields: dict[str, Any]) -> int:
    return int(fields.get("llama.attention.head_count_kv", fields["llama.attention.head_count"]))


def _token_ids(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", fields["tokenizer.ggml.eos_token_id"]),
    }


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    num_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(fields),
        "head_dim": fields["llama.embedding_length"] // num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": _short_float(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _short_float(fields.get("llama.rope.freq_base", 10_000.0)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **_token_ids(fields),
    }


def _short_float(value: float) -> float:
    # GGUF holds float32; its shortest decimal form is the number that the author wrote.
    return float(str(np.float32(value)))


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if fields.get("tokenizer.ggml.pre") in _PRE_TOKENIZERS_WITH_SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in _SPECIAL_TOKEN_TYPES]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = _token_ids(fields)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields.get("tokenizer.ggml.unknown_token_id", ids["eos_token_id"])],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
