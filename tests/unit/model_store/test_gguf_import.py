"""A GGUF file becomes the same model: weights in their places, rounded as torch does, tokens as they were."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from blend_core.errors import ConfigurationError
from blend_core.gguf_import import bfloat16_bits, convert_gguf, hugging_face_rope_rows

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 32, 4, 2, 64, 2
TOKENS = ["<s>", "</s>", "a", "b", "c", "ab", "1", "2", "Ġ"]


def llama_cpp_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    rows = weight.shape[0]
    return (
        weight.reshape(num_heads, 2, rows // num_heads // 2, weight.shape[1])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(path: Path, *, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Writes a tiny model and returns its weights by Hugging Face names."""
    rng = np.random.default_rng(0)
    shapes = {
        "q_proj": HIDDEN,
        "k_proj": HIDDEN // HEADS * KV_HEADS,
        "v_proj": HIDDEN // HEADS * KV_HEADS,
        "o_proj": HIDDEN,
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    expected = {}

    def add(name: str, hugging_face: str, *shape: int, num_heads: int = 0) -> None:
        weight = rng.normal(size=shape).astype(np.float32)
        expected[hugging_face] = weight
        writer.add_tensor(name, llama_cpp_rows(weight, num_heads) if num_heads else weight)

    add("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), HIDDEN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    for layer in range(LAYERS):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        add(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", HIDDEN)
        add(
            f"{ours}.attn_q.weight",
            f"{theirs}.self_attn.q_proj.weight",
            shapes["q_proj"],
            HIDDEN,
            num_heads=HEADS,
        )
        add(
            f"{ours}.attn_k.weight",
            f"{theirs}.self_attn.k_proj.weight",
            shapes["k_proj"],
            HIDDEN,
            num_heads=KV_HEADS,
        )
        add(f"{ours}.attn_v.weight", f"{theirs}.self_attn.v_proj.weight", shapes["v_proj"], HIDDEN)
        add(f"{ours}.attn_output.weight", f"{theirs}.self_attn.o_proj.weight", shapes["o_proj"], HIDDEN)
        add(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", HIDDEN)
        add(f"{ours}.ffn_gate.weight", f"{theirs}.mlp.gate_proj.weight", FEED_FORWARD, HIDDEN)
        add(f"{ours}.ffn_up.weight", f"{theirs}.mlp.up_proj.weight", FEED_FORWARD, HIDDEN)
        add(f"{ours}.ffn_down.weight", f"{theirs}.mlp.down_proj.weight", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_every_weight_lands_in_its_place(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(loaded[name], torch.from_numpy(weight).to(torch.bfloat16)), name


def test_the_folder_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 50_000.0
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 1
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer("ab12 c</s>")["input_ids"] == [5, 6, 7, 8, 4, 1]
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_other_models_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ConfigurationError, match="no Llama model"):
        convert_gguf(tmp_path / "m.gguf", tmp_path)


def test_row_order_of_rotary_weights_comes_back() -> None:
    weight = np.arange(32 * 8, dtype=np.float32).reshape(32, 8)
    assert np.array_equal(hugging_face_rope_rows(llama_cpp_rows(weight, 4), 4), weight)


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    values = np.concatenate(
        [values, np.array([0.0, -0.0, 1.0, 1.00390625, 1.01171875, 1e-40, 3e38], np.float32)]
    )
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bfloat16_bits(values), expected)


def test_config_is_plain_json(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (
        KV_HEADS,
        8,
        len(TOKENS),
    )
    assert config["tie_word_embeddings"] is True
