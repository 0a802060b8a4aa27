"""Configs of short runs that `replay.py` repeats, with numbers and choices away from their defaults."""

from runners.config.sections import LossConfig, OptimConfig, RewardConfig, RolloutConfig

SECTIONS = {"optim": OptimConfig, "loss": LossConfig, "rollout": RolloutConfig, "reward": RewardConfig}
CASES = {
    "clip, two passes": {
        "optim": {
            "learning_rate": 3e-3, "schedule": "linear", "warmup_ratio": 0.4, "betas": [0.8, 0.95],
            "eps": 1e-3, "weight_decay": 0.5, "max_grad_norm": 0.3, "batch_size": 3, "max_steps": 3,
            "gradient_accumulation_steps": 2, "num_iterations": 2, "minibatches": 2,
        },
        "loss": {
            "epsilon_low": 0.02, "epsilon_high": 0.03, "delta": 1.04, "correction": "token_truncate",
            "correction_cap": 0.5, "correction_floor": 0.45, "beta": 0.2, "aggregation": "token_mean",
            "scale": "batch",
        },
        "rollout": {
            "num_generations": 4, "max_new_tokens": 5, "temperature": 1.4, "top_k": 60,
            "check_every": 3, "max_batch": 5,
        },
        "reward": {"weights": [0.7, -1.3]},
    },
    "dual clip, dynamic sampling, late syncs": {
        "optim": {"learning_rate": 4e-3, "batch_size": 2, "max_steps": 6, "warmup_ratio": 0.5},
        "loss": {
            "surrogate": "dual_clip", "dual_clip": 1.05, "epsilon_low": 0.02, "correction": "token_mask",
            "correction_range": [0.845, 1.5], "beta": 0.1, "kl": "k2", "kl_bias_corrected": True,
            "entropy_coef": 0.05, "aggregation": "constant", "baseline": "leave_one_out", "scale": "none",
            "dynamic_sampling": True, "max_resample": 1, "overlong": {"buffer": 3, "penalty": 0.5},
            "sync_every": 3, "ref_sync_every": 2, "ref_mixup": 0.3,
        },
        "rollout": {"num_generations": 2, "max_new_tokens": 5, "top_k": 150},
        "reward": {"weights": [0.0, 1.0]},
    },
    "sequences, by epochs": {
        "optim": {"learning_rate": 2e-3, "batch_size": 2, "num_epochs": 2, "num_iterations": 2},
        "loss": {
            "preset": "luspo", "correction": "sequence_mask", "sequence_range": [0.3, 0.37],
            "sequence_ratio": "product", "baseline": "batch_mean", "scale": "batch",
        },
        "rollout": {"num_generations": 3, "max_new_tokens": 6, "top_k": 150},
        "reward": {"weights": [0.5, 2.0]},
    },
    "sapo": {
        "optim": {"learning_rate": 1e-3, "schedule": "constant", "max_steps": 2, "minibatches": 3},
        "loss": {
            "preset": "sapo", "sapo_tau_pos": 2.0, "sapo_tau_neg": 3.0, "correction": "sequence_truncate",
            "correction_cap": 0.25, "correction_floor": 0.2, "beta": 0.1, "kl": "k1",
        },
        "rollout": {"num_generations": 4, "max_new_tokens": 4, "min_p": 0.1},
        "reward": {"aggregate": "normalize_then_sum", "weights": [1.0, 0.5]},
    },
    "cispo": {
        "optim": {"learning_rate": 1e-3, "max_steps": 2, "num_iterations": 3, "batch_size": 2},
        "loss": {
            "preset": "cispo", "epsilon_high": 0.01, "correction": "sequence_mask_weighted",
            "sequence_range": [0.5, 0.81], "top_entropy_quantile": 0.5,
            "mask_truncated_completions": True,
        },
        "rollout": {"num_generations": 3, "max_new_tokens": 6, "top_p": 0.8},
        "reward": {},
    },
}  # fmt: skip
# Keys that say which completions there are, as the rewards were called with them, or that only say how fast.
OF_THE_CALLS = {"num_generations", "max_new_tokens", "batch_size", "max_steps", "num_epochs", "preset"}
OF_SPEED = {"check_every", "max_batch"}
