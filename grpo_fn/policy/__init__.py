"""A model as a pure function of a parameter tree: policies, heads, quantized roles and decoding.

This package imports the backends' interface and the root helpers; not `grpo_fn.algorithm`,
`grpo_fn.learner` or `grpo_fn.rollout`.
"""

from grpo_fn.policy.caches import kv_caches
from grpo_fn.policy.caches.kv_caches import plain_caches
from grpo_fn.policy.caches.prefix_cache import ROOM, shares_prefix, sharing_pays
from grpo_fn.policy.calibration import (
    Carries,
    Moments,
    added,
    block_width,
    carries_of,
    folded,
    input_moments,
    round_calibrated,
)
from grpo_fn.policy.decode_weights import decode_weights_bytes
from grpo_fn.policy.head import Head
from grpo_fn.policy.image_forward import takes_images, use_multimodal_rope
from grpo_fn.policy.layers.learning_form import checkpoint_layers, checkpoint_mlps, gated_mlps
from grpo_fn.policy.layers.model_fixes import bound_positions
from grpo_fn.policy.layers.patched_layers import patch_layers
from grpo_fn.policy.layers.quantized_layers import QuantMode, quantize
from grpo_fn.policy.layers.routers import check_replay, experts_per_token, has_routers
from grpo_fn.policy.policy import Policy
from grpo_fn.policy.quantized_role import (
    GROUP_SIZES,
    MODES,
    STORAGES,
    QuantizedRole,
    formats_within,
    is_quantized,
    quant_mode,
    quantizable,
    quantized_role,
    rounding_effects,
)
