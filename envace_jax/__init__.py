"""EnvACE in JAX: train tool-using language-model agents by world rehearsal."""

__version__ = "0.1.0"
