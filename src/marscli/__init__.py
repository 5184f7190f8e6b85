"""marscli: make any instruction-tuned language model write several tokens per forward pass."""

__version__ = "0.1.0"
