"""What is decoded: architecture, weights and tokens. Knows nothing of Pallas."""

from model.config import ConfigError, ModelConfig

__all__ = ["ConfigError", "ModelConfig"]
