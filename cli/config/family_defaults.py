"""Defaults of a model's family, for keys that a recipe leaves out."""

from __future__ import annotations

from collections.abc import Container, Mapping


def fill_in_family(model: object, recipe_family: object, user_keys: Container[str]) -> None:
    """Set the missing keys of a composed model to the defaults of its family.

    `recipe_family` is the family in the recipe. If the command line sets another one, keys that have the default of the recipe's family
    get that of the new one, except keys that the command line sets: model.family=llama makes a Llama from a GPT recipe.
    """
    if not isinstance(model, dict) or not isinstance(family := model.get("family"), str):
        return
    old = _defaults(recipe_family) if recipe_family != family else {}
    for key, value in _defaults(family).items():
        is_stale = key in old and model.get(key) == old[key] and f"model.{key}" not in user_keys
        if is_stale or key not in model:
            model[key] = value


def _defaults(family: object) -> Mapping[str, object]:
    """Return the defaults of a family; {} for an unknown one."""
    from ...trainer.models.families import FAMILIES

    return FAMILIES[family].defaults if isinstance(family, str) and family in FAMILIES else {}
