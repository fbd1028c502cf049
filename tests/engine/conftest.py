"""Fixtures of a small model's engines; a test file may put its own in their place."""

from helpers.small_engine import hf, make, prompts, tokenizer, wanted

__all__ = ["hf", "make", "prompts", "tokenizer", "wanted"]
