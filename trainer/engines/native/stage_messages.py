"""Hidden states and their gradients on their way between pipeline stages: sends and receives that do not block."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.process_groups import Grid
from ...parallel.world import COLLECTIVE_TIMEOUT
from ...plan.layout.schedules import Action, part_of, stage_and_chunk
from ...plan.native.posted_receives import receives_ahead

TAGS = 2**20  # more than the messages under way between two stages


class MessageKey(NamedTuple):
    """What a stage sends: the hidden states (F) that a part computed, or the gradient (B) of those that it was given."""

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

    def sends(self, stage: int, actions: Iterable[Action]) -> dict[int, list[MessageKey]]:
        """What a stage that runs these actions sends to each other stage, in order."""
        sent: dict[int, list[MessageKey]] = {}
        for action in actions:
            part = self.part(stage, action.chunk)
            to = part + 1 if action.kind == "F" else part - 1
            if action.kind != "W" and 0 <= to < self.parts and self.stage(to) != stage:
                sent.setdefault(self.stage(to), []).append(MessageKey("F" if action.kind == "F" else "B", part, action.micro))
        return sent


class StageMessages:
    """One rank's messages of a step.

    Between two stages messages keep the order in which their sender computes them, in each direction on a process group of its own, so
    that no message waits for one of the other direction. A receive is posted before it is needed (`receives_ahead` says how long
    before); a send keeps its tensor until it is gone. Messages that a step without a flush has not received are those that the next one
    receives first.
    """

    def __init__(self, grid: Grid, chain: StageChain) -> None:
        self.chain, self.stage = chain, grid.coordinate("pp")
        group = grid.group("pp")
        self.ranks = group.ranks if group else ()
        self._receives_ahead = receives_ahead(chain.chunks)
        self._up = group.handle if group else None  # to stages of a higher number
        self._down = _second_group(grid) if group else None
        self._ahead: defaultdict[int, deque[MessageKey]] = defaultdict(deque)  # by sending stage: what is to be received, in order
        self._tags: dict[MessageKey, int] = {}
        self._numbers: Counter[tuple[int, int]] = Counter()  # messages so far, by sending and receiving stage
        self._posted: dict[MessageKey, tuple[Tensor, Any]] = {}
        self._sending: list[tuple[Any, Tensor]] = []

    def begin(self, actions: Sequence[Sequence[Action]], like: Tensor, device: torch.device) -> None:
        """Begin a step in which every stage runs its actions; `like` has the shape and type of every message."""
        self._like, self._device = like, device
        for stage, own in enumerate(actions):
            for to, keys in self.chain.sends(stage, own).items():
                if self.stage in (stage, to):
                    first = self._numbers[stage, to]
                    self._tags |= {key: tag % TAGS for tag, key in enumerate(keys, first)}
                    self._numbers[stage, to] += len(keys)
                if to == self.stage:
                    self._ahead[stage].extend(keys)

    def send(self, key: MessageKey, tensor: Tensor, to: int) -> None:
        """Send a tensor to the stage that holds part `to`."""
        self._sending = [each for each in self._sending if not each[0].is_completed()]
        stage = self.chain.stage(to)
        group = self._up if stage > self.stage else self._down
        tensor = tensor.detach().contiguous()
        self._sending.append((dist.isend(tensor, self.ranks[stage], group=group, tag=self._tags.pop(key)), tensor))

    def receive(self, key: MessageKey) -> Tensor:
        """Wait for a message and return it; post the next receives of its sender."""
        stage = self.chain.stage(key.part)
        while key not in self._posted:
            self._post(stage)
        tensor, work = self._posted.pop(key)
        while self._ahead[stage] and self._posted_of(stage) < self._receives_ahead:
            self._post(stage)
        work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until all that was sent is gone."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def _posted_of(self, stage: int) -> int:
        """The receives that are posted for messages of a stage, and not yet used."""
        return sum(self.chain.stage(key.part) == stage for key in self._posted)

    def _post(self, stage: int) -> None:
        key = self._ahead[stage].popleft()
        tensor = torch.empty_like(self._like, device=self._device)
        group = self._up if stage < self.stage else self._down
        self._posted[key] = tensor, dist.irecv(tensor, self.ranks[stage], group=group, tag=self._tags.pop(key))


def _second_group(grid: Grid) -> dist.ProcessGroup:
    """A group of the same ranks as that of the pipeline axis; every rank calls it."""
    own: Any = None
    for ranks in grid.position.mesh.groups("pp"):
        group = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT)
        own = group if grid.world.rank in ranks else own
    assert isinstance(own, dist.ProcessGroup)
    return own
