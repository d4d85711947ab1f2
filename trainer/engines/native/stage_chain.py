"""The parts of a model on the stages of a pipeline, and what their actions give to each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...plan.layout.schedules import Action, part_of, stage_and_chunk


class MessageKey(NamedTuple):
    """What one part gives to another: the hidden states (F) that it computed, or the gradient (B) of those that it was given."""

    kind: Literal["F", "B"]
    part: int
    micro: int


@dataclass(frozen=True, kw_only=True)
class StageChain:
    """The parts of a model on the stages of a pipeline, in the order of the model."""

    stages: int
    chunks: int
    folded: bool

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    def part(self, stage: int, chunk: int) -> int:
        """The number of a stage's part."""
        return part_of(stage, chunk, self.stages, folded=self.folded)

    def stage(self, part: int) -> int:
        """The stage that holds a part."""
        return stage_and_chunk(part, self.stages, folded=self.folded)[0]

    def made_by(self, stage: int, action: Action) -> MessageKey | None:
        """What a stage's action makes for another part; None where there is none."""
        part = self.part(stage, action.chunk)
        if action.kind == "F":
            return MessageKey("F", part, action.micro) if part + 1 < self.parts else None
        return MessageKey("B", part, action.micro) if action.kind != "W" and part else None

    def taken_by(self, stage: int, action: Action) -> MessageKey | None:
        """What a stage's action takes from another part; None where it takes nothing."""
        part = self.part(stage, action.chunk)
        if action.kind == "F":
            return MessageKey("F", part - 1, action.micro) if part else None
        return MessageKey("B", part + 1, action.micro) if action.kind != "W" and part + 1 < self.parts else None

    def receiver(self, key: MessageKey) -> int:
        """The stage that takes what a part makes."""
        return self.stage(key.part + (1 if key.kind == "F" else -1))

    def sends(self, stage: int, actions: Iterable[Action]) -> dict[int, list[MessageKey]]:
        """What a stage that runs these actions sends to each other stage, in order."""
        sent: dict[int, list[MessageKey]] = {}
        for action in actions:
            key = self.made_by(stage, action)
            if key and (to := self.receiver(key)) != stage:
                sent.setdefault(to, []).append(key)
        return sent
