"""The versions of a stage's weights that micro-batches under way meet (weight stashing, arXiv:1806.03377)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from .data_parallel.weight_buckets import WeightBucket


class WeightVersions:
    """Flat weights of all buckets by version, the number of updates since the last flush. The parameters are views of one version.

    A version stays in the memory in which its micro-batches' forwards met it: autograd keeps some weights by their memory, and others by
    the parameter, which must show the same version in backward.
    """

    def __init__(self, buckets: Sequence[WeightBucket]) -> None:
        self._buckets = buckets
        self._free: list[list[Tensor]] = []  # memory of versions that nothing needs
        self._held: dict[int, list[Tensor]] = {0: [bucket.weights for bucket in buckets]}
        self.newest = self._used = 0

    def use(self, version: int) -> None:
        """Make the parameters views of a version."""
        if version != self._used:
            for bucket, flat in zip(self._buckets, self._held[version], strict=True):
                bucket.point_parameters_at(flat)
            self._used = version

    def add(self, *, keep: bool) -> None:
        """Begin a new version with the values of the newest, which is to be stepped; `keep`: the newest one stays as it is."""
        if keep:
            into = self._free.pop() if self._free else [None] * len(self._buckets)
            for bucket, flat in zip(self._buckets, into, strict=True):
                bucket.move_weights(flat)
        else:
            del self._held[self.newest]
        self.newest += 1
        self._held[self.newest] = [bucket.weights for bucket in self._buckets]
        if not keep and self._used == self.newest - 1:
            self._used = self.newest  # the same memory

    def drop_before(self, version: int) -> None:
        """Free the versions before this one."""
        for each in [each for each in self._held if each < version]:
            self._free.append(self._held.pop(each))

    def restart(self) -> None:
        """Number the newest version 0, after a flush, and show it."""
        self.drop_before(self.newest)
        self.use(self.newest)
        self._held = {0: self._held.pop(self.newest)}
        self.newest = self._used = 0

    def held_tensors(self) -> Iterator[Tensor]:
        """Yield the memory of all versions."""
        for tensors in (*self._held.values(), *self._free):
            yield from tensors
