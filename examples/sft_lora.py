"""Fine-tune an MoE model with TRL's SFTTrainer and LoRA on the experts, recalibrated.

Runs anywhere, without a download: it makes a tiny Qwen3-MoE and a byte-level tokenizer first. For a
real model, give its directory: python examples/sft_lora.py --model DIR --text FILE.jsonl
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import SFTConfig, SFTTrainer

import lrmoe


def main() -> None:
    """Train for a few steps and save the adapter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint directory; default: a tiny model made here")
    parser.add_argument("--text", help="jsonl file with a 'text' field; default: a few lines")
    parser.add_argument("--out", default="runs/sft_lora")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.2, help="C; 0 is exact training")
    options = parser.parse_args()

    directory = options.model or make_tiny_model(Path(options.out) / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model = get_peft_model(
        model,
        LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
    )
    handle = lrmoe.configure(model, lrmoe.Recalibration(rate=options.rate))
    if options.text:
        text = load_dataset("json", data_files=options.text, split="train")
    else:
        text = Dataset.from_dict({"text": [f"{i} times {i} is {i * i}." for i in range(64)]})

    callback = lrmoe.TrainerCallback(handle)
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=text,
        args=SFTConfig(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            max_length=256,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        ),
        callbacks=[callback],
    )
    callback.attach(trainer)
    trainer.train()
    model.save_pretrained(Path(options.out) / "adapter")


def make_tiny_model(directory: Path) -> str:
    """Save a tiny random Qwen3-MoE and a tokenizer whose tokens are bytes; return the directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    ).save_pretrained(directory)
    config = Qwen3MoeConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        eos_token_id=vocabulary["<end>"],
        pad_token_id=vocabulary["<end>"],
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return str(directory)


if __name__ == "__main__":
    main()
