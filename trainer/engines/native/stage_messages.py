"""Hidden states and their gradients on their way between pipeline stages: sends and receives that do not block."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.process_groups import Grid
from ...parallel.world import COLLECTIVE_TIMEOUT
from ...plan.layout.schedules import Action
from ...plan.native.posted_receives import receives_ahead
from .message_needs import own_actions_needed
from .stage_chain import MessageKey, StageChain

TAGS = 2**20  # more than the messages under way between two stages


class StageMessages:
    """One rank's messages of a step.

    Between two stages messages keep the order in which their sender computes them, in each direction on a process group of its own, so
    that no message waits for one of the other direction. A receive is posted before it is needed (`receives_ahead` says how long
    before). On a GPU it is not posted before all of this stage's actions have run that its message depends on: it is a kernel that waits,
    and CUDA may wait for all kernels when it loads another or frees memory ("Lazy Loading" in the CUDA programming guide), so that an
    action would wait for a message that waits for it. A send keeps its tensor until it is gone. Messages that a step without a flush has
    not received are those that the next one receives first.
    """

    def __init__(self, grid: Grid, chain: StageChain) -> None:
        self.chain, self.stage = chain, grid.coordinate("pp")
        group = grid.group("pp")
        self.ranks = group.ranks if group else ()
        self._receives_ahead = receives_ahead(chain.chunks)
        self._listed: Sequence[Sequence[Action]] = ()  # the actions of the step
        self._needs: dict[MessageKey, int] = {}  # on a GPU: how many of this stage's own actions each message of the step depends on
        self._ran = 0  # of this stage's actions
        self._up = group.handle if group else None  # to stages of a higher number
        self._down = _second_group(grid) if group else None
        for each in (self._up, self._down):  # else NCCL would send all that a rank has for others on one stream, in one order
            assert each is None or each.bound_device_id is None
        self._ahead: defaultdict[int, deque[MessageKey]] = defaultdict(deque)  # by sending stage: what is to be received, in order
        self._tags: dict[MessageKey, int] = {}
        self._numbers: Counter[tuple[int, int]] = Counter()  # messages so far, by sending and receiving stage
        self._posted: dict[MessageKey, tuple[Tensor, Any]] = {}
        self._sending: list[tuple[Any, Tensor]] = []

    def begin(self, actions: Sequence[Sequence[Action]], like: Tensor, device: torch.device) -> None:
        """Begin a step in which every stage runs its actions; `like` has the shape and type of every message."""
        self._like, self._device = like, device
        if actions is not self._listed and device.type != "cpu":
            self._listed, self._needs = actions, own_actions_needed(self.stage, actions, self.chain)
        for stage, own in enumerate(actions):
            for to, keys in self.chain.sends(stage, own).items():
                if self.stage in (stage, to):
                    first = self._numbers[stage, to]
                    self._tags |= {key: tag % TAGS for tag, key in enumerate(keys, first)}
                    self._numbers[stage, to] += len(keys)
                if to == self.stage:
                    self._ahead[stage].extend(keys)

    def begin_action(self, ran: int) -> None:
        """Begin this stage's next action, before which it ran so many of the step; post receives ahead."""
        self._ran = ran
        for stage in self._ahead:
            self._post_ahead(stage)

    def send(self, key: MessageKey, tensor: Tensor, to: int) -> None:
        """Send a tensor to the stage that holds part `to`."""
        self._sending = [each for each in self._sending if not each[0].is_completed()]
        stage = self.chain.stage(to)
        group = self._up if stage > self.stage else self._down
        tensor = tensor.detach().contiguous()
        self._sending.append((dist.isend(tensor, self.ranks[stage], group=group, tag=self._tags.pop(key)), tensor))

    def receive(self, key: MessageKey) -> Tensor:
        """Wait for a message, which the action that has begun needs, and return it; post receives of its sender ahead."""
        assert self._needs.get(key, 0) <= self._ran, "the action that needs it has not begun"
        stage = self.chain.stage(key.part)
        while key not in self._posted:
            self._post(stage)
        tensor, work = self._posted.pop(key)
        self._post_ahead(stage)
        work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until all that was sent is gone."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def _post_ahead(self, stage: int) -> None:
        """Post receives of a stage's next messages: those that nothing which this stage has yet to run is needed for."""
        ahead = self._ahead[stage]
        while ahead and self._posted_of(stage) < self._receives_ahead and self._needs.get(ahead[0], 0) <= self._ran:
            self._post(stage)

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
