"""trimtab: a self-hosted service for LLM post-training that speaks the Tinker API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.embedded import local

__version__ = "0.1.0"
__all__ = ["__version__", "local"]


def __getattr__(name: str) -> Any:
    """`trimtab.local` brings the SDK and, once entered, the whole server: only when asked for."""
    if name == "local":
        from trimtab.embedded import local

        return local
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
