"""The defaults of a model's family, where a recipe leaves keys out."""

from __future__ import annotations

from collections.abc import Container, Mapping


def fill_in_family(model: object, before: object, overridden: Container[str]) -> None:
    """Put the defaults of `model.family` into a composed model where keys are missing.

    `before` is the family that the recipe names. Where the command line names another family, keys that have the default of the first
    get the default of the other, except those that the command line itself overrides: model.family=llama makes a Llama of a GPT recipe.
    """
    if not isinstance(model, dict) or not isinstance(family := model.get("family"), str):
        return
    old = _defaults(before) if before != family else {}
    for key, value in _defaults(family).items():
        is_stale = key in old and model.get(key) == old[key] and f"model.{key}" not in overridden
        if is_stale or key not in model:
            model[key] = value


def _defaults(family: object) -> Mapping[str, object]:
    """Return the defaults of a family; {} of an unknown one."""
    from ...trainer.models.families import FAMILIES

    return FAMILIES[family].defaults if isinstance(family, str) and family in FAMILIES else {}
