"""Tells a Ctrl-C from an error: OmegaConf that is interrupted raises an error of its own, which hides the KeyboardInterrupt."""

from __future__ import annotations


def raise_if_interrupted(error: BaseException) -> None:
    """Raise KeyboardInterrupt if `error` was raised while one was handled."""
    context: BaseException | None = error
    while context is not None:
        if isinstance(context, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        context = context.__context__
