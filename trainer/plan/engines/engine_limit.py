"""One limit of an engine: a value of a key that it does not run, and what may fix it."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.changed_run import Change, overrides

DOES_NOT_RUN = " does not run "  # between the engine and the override, in the sentence of a limit


@dataclass(frozen=True, slots=True)
class EngineLimit:
    """A value of a key that an engine does not run; changes that may fix it, the nearest first, or a fix in words where there is none."""

    engine: str
    key: str
    value: object
    candidates: tuple[Change, ...] = ()
    fix: str = ""

    @property
    def says(self) -> str:
        """The limit as a sentence."""
        (override,) = overrides(((self.key, self.value),))
        if self.key == "engine":
            return f"{override} can be planned, but has no class that trains"
        return f"engine {self.engine}{DOES_NOT_RUN}{override}"
