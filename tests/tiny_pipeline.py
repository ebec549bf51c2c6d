"""A whole Krea2Pipeline of random weights, small enough for tests: what the real one has, and in its shape."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLModel

CHANNELS, FACTOR, LAYERS, WIDTH = 4, 4, 2, 16


def write_pipeline(folder: Path, transformer: Krea2Transformer2DModel | None = None) -> Path:
    """The same weights every time. Without a transformer it is what a run begins with: that it trains itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[0.5, 1.0, 2.0, 1.5],
        )
        text_encoder = Qwen3VLModel(_text_config()).eval()
    pipeline = Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=_tokenizer(),
        transformer=transformer,
        text_encoder_select_layers=(1, 3),
    )
    pipeline.save_pretrained(folder)
    return folder


def _text_config() -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 256,
            "hidden_size": WIDTH,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
        },
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """Words, signs and line ends: the template has as many of them (34 before, 5 behind) as in Qwen's own tokens."""
    words = "system Describe the image by detailing color shape size texture quantity text spatial relationships of "
    words += "objects and background user assistant number a"
    known = [*words.split(), ",", ":", "\n", *map(str, range(100))]
    vocabulary = {word: place for place, word in enumerate(["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", *known])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"\n|[A-Za-z0-9]+|[^\sA-Za-z0-9]"), "removed", invert=True)
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", **special)
