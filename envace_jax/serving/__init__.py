"""The OpenAI-compatible server on the slot engine; `envace_jax.serve` is its command."""
