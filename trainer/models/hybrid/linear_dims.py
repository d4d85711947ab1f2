"""The logical dims of linear attention's tensors."""

from __future__ import annotations

from ..ops.op_table import Dims

LINEAR_KEY: Dims = ("linear_keys", "linear_key_dim")
LINEAR_VALUE: Dims = ("linear_keys", "values_per_key", "linear_value_dim")
VALUE_HEADS: Dims = ("linear_keys", "values_per_key")
# In convolutions and rule a rank has all tokens of its share of the heads.
WHOLE: Dims = ("core_tokens", "batch")
OWN_KEY: Dims = ("core_linear_keys", "linear_key_dim")
OWN_VALUE: Dims = ("core_linear_keys", "values_per_key", "linear_value_dim")
OWN_HEADS: Dims = ("core_linear_keys", "values_per_key")
