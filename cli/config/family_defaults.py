"""What a model of a family has where a recipe says nothing of it."""

from __future__ import annotations

from collections.abc import Container


def fill_in_family(model: object, before: object, said: Container[str]) -> None:
    """Put the defaults of `model.family` into a composed model where they are missing.

    `before` is the family that the recipe itself names. Where the command line names another, what was the default of the one becomes
    the default of the other, but for keys that the command line `said`: model.family=llama makes a Llama of a GPT recipe.
    """
    from ...trainer.models.families import DEFAULTS

    if not isinstance(model, dict) or not isinstance(family := model.get("family"), str):
        return
    old = DEFAULTS.get(before, {}) if isinstance(before, str) and before != family else {}
    for key, value in DEFAULTS.get(family, {}).items():
        stale = key in old and model.get(key) == old[key] and f"model.{key}" not in said
        if stale or key not in model:
            model[key] = value
