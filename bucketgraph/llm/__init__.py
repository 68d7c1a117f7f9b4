"""Llama- and Qwen-family language models served from buckets."""
