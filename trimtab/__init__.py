"""trimtab: a self-hosted service for LLM post-training that speaks the Tinker API."""

__version__ = "0.1.0"
