"""DeepSpeed 0.19's constants and defaults that decide what a rank holds and sends."""

from __future__ import annotations

ALIGNED = 2  # a flat tensor is padded to a multiple of this times its ranks (nccl_start_alignment_factor)

# Elements; of ZeRO 3.
LIVE = 1_000_000_000  # parameters that it keeps gathered at most (stage3_max_live_parameters)
REUSED = 1_000_000_000  # it releases a parameter whose next use is further away (stage3_max_reuse_distance)
PERSISTENT = 100_000  # it never releases a parameter of at most so many elements (stage3_param_persistence_threshold)
SUBGROUP = 1_000_000_000  # it steps parameters in groups of this size (sub_group_size)
