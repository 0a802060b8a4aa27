"""The config's sections: their keys, types, defaults and ranges. Each class is one table of the TOML file."""

from typing import Literal

import attrs
from attrs import field
from attrs.validators import optional

from runners.config import rules

EMBEDDED = "embedded"
EMBEDDED_TOOLS = "embedded-tools"
SHIPPED = (EMBEDDED, EMBEDDED_TOOLS)
"""The names of the shipped models and data, for `model.path` and `data.source`."""

CALCULATOR = "calculator"
"""The name of nanochat's environment, for `env.factory`."""

REWARD_NAMES = (
    "correctness_reward_func",
    "int_reward_func",
    "strict_format_reward_func",
    "soft_format_reward_func",
    "xmlcount_reward_func",
)
REWARD_ARGUMENTS = (
    "completions",
    "prompts",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)
"""The arguments that every reward may take besides the dataset's columns."""

_NONE: dict[str, bool | int | float | str] = {}
SYSTEM_PROMPT = """\
Work the problem out first, then give the result. Use exactly this form:
<reasoning>
your working, step by step
</reasoning>
<answer>
the final number, alone
</answer>"""

Tune = Literal["full", "lora", "dora"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Stored = Literal["float32", "bfloat16"]
QuantizationMode = Literal["none", "affine-8", "affine-6", "affine-4", "affine-3", "mxfp8", "mxfp4", "nvfp4"]
Storage = Literal["dequantized", "packed"]
Launch = Literal["auto", "eval", "async"]
Aggregate = Literal["sum_then_normalize", "normalize_then_sum"]
Baseline = Literal["group_mean", "leave_one_out", "batch_mean"]
Scale = Literal["group", "batch", "none"]
ScheduleName = Literal["cosine", "linear", "constant"]
OnBadRow = Literal["raise", "skip"]
SharePrompts = Literal["auto", "always", "never"]
OnError = Literal["skip", "raise"]
OnToolError = Literal["observation", "no_reward"]
TurnSchedule = Literal["together", "arrival"]
OnSaveError = Literal["continue", "stop"]
TokenLog = Literal["none", "sampled", "moved"]
JudgeKind = Literal["score", "ranking", "classifier"]

JUDGE_PREFIX = "judge."
"""The prefix of a judge in `reward.functions`: the name of a table [judge.NAME] follows."""


def judge_of(function: str) -> str | None:
    """The NAME of the table [judge.NAME] if an entry of `reward.functions` means one, else None."""
    is_judge = function.startswith(JUDGE_PREFIX) and ":" not in function
    return function.removeprefix(JUDGE_PREFIX) if is_judge else None


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class RunConfig:
    """[run]: a run lives in output_dir/name."""

    name: str = field(default="grpo", validator=rules.run_name())
    output_dir: str = field(default="outputs", validator=rules.text())
    seed: int = field(default=0, validator=rules.at_least(0, 2**63 - 1))
    overwrite: bool = False  # start over in a folder that holds a finished run


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class LoraConfig:
    """[model] lora: mlx-lm's adapters, used with tune = "lora" or "dora"."""

    rank: int = field(default=8, validator=rules.at_least(1))
    scale: float = field(default=20.0, validator=rules.above(0))
    layers: int = field(default=-1, validator=rules.minus_one_or_positive())  # from the last; -1: all
    keys: tuple[str, ...] = field(default=(), validator=rules.each_text())  # empty: mlx-lm's choice


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class ModelConfig:
    """[model]: what is trained, and in which precision."""

    path: str = field(validator=rules.text())  # "embedded(-tools)", an mlx-lm model folder, or a Hub name
    tune: Tune = "full"
    lora: LoraConfig = field(factory=LoraConfig)
    dtype: Dtype = "auto"  # of the computation
    master: Stored = "float32"  # of the weights that the optimizer moves; bfloat16 is rounded stochastically
    trust_remote_code: bool = False
    loader: str = ""  # custom function that opens the folder; empty: mlx-lm


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class DataConfig:
    """[data]: questions, answers and the prompt around a question."""

    source: str = field(default="openai/gsm8k", validator=rules.text())
    name: str = ""  # the Hub data set's configuration
    split: str = field(default="train", validator=rules.text())
    eval_split: str = field(default="test", validator=rules.text())
    question: str = field(default="question", validator=rules.text())
    answer: str = "answer"  # empty: rows have none, and an environment rewards
    prompt: str = ""  # the column of whole prompts, lists of messages, in place of questions; empty: none
    image: str = ""  # the column of images, paths beside the data or bytes; empty: none
    image_folder: str = ""  # the folder of the images' paths, which lie inside; empty: the data's
    image_max_pixels: int = field(default=0, validator=rules.at_least(0))  # scaled down to; 0: the model's
    system_prompt: str = SYSTEM_PROMPT
    nudge: str = "<reasoning>"  # the completion's first words, written into the prompt
    chat_template_kwargs: dict[str, bool | int | float | str] = field(
        default=_NONE, hash=False, validator=rules.template_arguments()
    )
    max_samples: int = field(default=0, validator=rules.at_least(0))  # 0: all
    max_prompt_length: int = field(default=512, validator=rules.at_least(1))  # tokens
    on_bad_row: OnBadRow = "raise"
    transform: str = ""  # custom function from a row to a row; empty: none


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class RolloutConfig:
    """[rollout]: how completions are drawn."""

    num_generations: int = field(default=8, validator=rules.at_least(2))
    max_new_tokens: int = field(default=512, validator=rules.at_least(1))
    temperature: float = field(default=1.0, validator=rules.above(0))
    top_p: float = field(default=1.0, validator=rules.fraction(zero=False))
    top_k: int = field(default=0, validator=rules.at_least(0))  # 0: off
    min_p: float = field(default=0.0, validator=rules.fraction(one=False))
    stop: tuple[str, ...] = field(default=(), validator=rules.each_text())
    quantization: QuantizationMode = "none"
    storage: Storage = "dequantized"
    group_size: int = field(default=0, validator=rules.one_of(0, 32, 64, 128))  # 0: the mode's own
    quantize_head: bool = False  # embeddings and head too
    mismatch_limit: float = field(default=0.5, validator=rules.not_negative())  # nats a token; 0: none
    launch: Launch = "auto"  # of decoding steps: see `machine.launch_modes`; auto: by the backend
    check_every: int = field(default=8, validator=rules.at_least(1))  # steps
    max_batch: int = field(default=0, validator=rules.at_least(0))  # rows decoded together; 0: what fits


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class RewardConfig:
    """[reward]: functions (a name, package.module:function, file.py:function, judge.NAME), their weights."""

    functions: tuple[str, ...] = field(default=REWARD_NAMES, validator=rules.each_once())
    weights: tuple[float, ...] = ()  # empty: 1.0 each
    aggregate: Aggregate = "sum_then_normalize"
    timeout: float = field(default=60.0, validator=rules.not_negative(rules.HUGE))  # seconds a call; 0: none
    on_error: OnError = "skip"
    stop_if_all_fail: bool = True  # if a reward fails for every completion of a batch step


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class JudgeConfig:
    """[judge.NAME]: a model that rewards completions; `reward.functions` names it as "judge.NAME"."""

    kind: JudgeKind = "score"
    url: str = ""  # of an API like OpenAI's, up to and without /chat/completions
    model: str = ""  # as that API calls it; empty: the server's only one
    api_key_env: str = ""  # the variable of the environment that holds the key; empty: no key
    criteria: str = "The response answers the question correctly, and its working is sound."
    system_prompt: str = ""  # empty: no system message
    prompt: str = ""  # custom text with {question}, {completion}, ...; empty: ours
    pattern: str = ""  # custom regular expression that finds the score; empty: the form that ours asks for
    scale: tuple[float, float] = field(default=(0.0, 10.0), validator=rules.rising())  # of scores
    temperature: float = field(default=0.0, validator=rules.not_negative())
    max_tokens: int = field(default=512, validator=rules.at_least(1))  # of an answer
    extra: str = ""  # more of the request, a JSON object
    path: str = ""  # of a classifier: a folder, or a Hub name
    label: str = ""  # of a classifier with several: the one whose probability is the reward
    max_length: int = field(default=4096, validator=rules.at_least(8))  # tokens that a classifier reads
    batch_tokens: int = field(default=8192, validator=rules.at_least(8))  # that it computes together
    concurrency: int = field(default=8, validator=rules.at_least(1, 1024))  # requests at a time
    timeout: float = field(default=60.0, validator=rules.above(0, rules.HUGE))  # seconds a request
    batch_timeout: float = field(default=600.0, validator=rules.not_negative(rules.HUGE))  # seconds; 0: none
    retries: int = field(default=3, validator=rules.at_least(0, 100))
    cache: bool = True  # keep answers in the user's cache folder
    price_in: float = field(default=0.0, validator=rules.not_negative())  # of a million tokens
    price_out: float = field(default=0.0, validator=rules.not_negative())


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class OverlongConfig:
    """[loss] overlong: DAPO's penalty on completions that come close to the length limit."""

    buffer: int = field(default=0, validator=rules.at_least(0))  # tokens before the limit; 0: no penalty
    penalty: float = field(default=1.0, validator=rules.not_negative())  # at the limit


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class LossConfig:
    """[loss]: a preset and what differs from it. None: as the preset has it (`Config.check` fills it in)."""

    # LossSpec knows these names.
    preset: str = field(default="grpo", validator=rules.text())
    level: str | None = field(default=None, validator=optional(rules.text()))
    surrogate: str | None = field(default=None, validator=optional(rules.text()))
    epsilon_low: float | None = field(default=None, validator=optional(rules.fraction(one=False)))
    epsilon_high: float | None = field(default=None, validator=optional(rules.not_negative()))
    delta: float | None = field(default=None, validator=optional(rules.above(1)))
    dual_clip: float | None = field(default=None, validator=optional(rules.above(1)))
    sapo_tau_pos: float | None = field(default=None, validator=optional(rules.above(0)))
    sapo_tau_neg: float | None = field(default=None, validator=optional(rules.above(0)))
    correction: str | None = field(default=None, validator=optional(rules.text()))
    correction_cap: float | None = field(default=None, validator=optional(rules.above(0)))
    correction_floor: float | None = field(default=None, validator=optional(rules.not_negative()))
    correction_range: tuple[float, float] | None = field(default=None, validator=optional(rules.rising()))
    sequence_range: tuple[float, float] | None = field(default=None, validator=optional(rules.rising()))
    sequence_ratio: str | None = field(default=None, validator=optional(rules.text()))
    beta: float | None = field(default=None, validator=optional(rules.not_negative()))
    kl: str | None = field(default=None, validator=optional(rules.text()))
    kl_bias_corrected: bool | None = None
    aggregation: str | None = field(default=None, validator=optional(rules.text()))
    entropy_coef: float | None = field(default=None, validator=optional(rules.not_negative()))
    router_aux_coef: float = field(default=0.0, validator=rules.not_negative())  # of models with experts
    router_replay: bool = False  # of models with experts: the learner uses the experts that the sampler chose
    baseline: Baseline | None = None
    scale: Scale | None = None
    mask_truncated_completions: bool = False
    dynamic_sampling: bool | None = None
    max_resample: int = field(default=3, validator=rules.at_least(0))  # rounds a batch
    overlong: OverlongConfig | None = None
    top_entropy_quantile: float = field(default=1.0, validator=rules.fraction(zero=False))  # 1: every token
    sync_every: int = field(default=1, validator=rules.at_least(1))
    ref_sync_every: int = field(default=0, validator=rules.at_least(0))  # 0: never
    ref_mixup: float = field(default=0.6, validator=rules.fraction(zero=False))
    ref_quantization: QuantizationMode = "none"
    ref_storage: Storage = "packed"


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class OptimConfig:
    """[optim]: AdamW and the amount of training."""

    learning_rate: float = field(default=1e-6, validator=rules.not_negative())
    schedule: ScheduleName = "cosine"
    warmup_ratio: float = field(default=0.1, validator=rules.fraction())  # of all updates
    betas: tuple[float, float] = field(default=(0.9, 0.999), validator=rules.each_share())
    eps: float = field(default=1e-8, validator=rules.above(0))
    weight_decay: float = field(default=0.0, validator=rules.not_negative())
    moments: Stored = "float32"  # of the two averages; bfloat16 is rounded stochastically
    max_grad_norm: float = field(default=1.0, validator=rules.not_negative())  # 0: no clipping
    batch_size: int = field(default=1, validator=rules.at_least(1))  # prompts a batch step
    gradient_accumulation_steps: int = field(default=1, validator=rules.at_least(1))
    num_epochs: int = field(default=1, validator=rules.at_least(1))
    max_steps: int = field(default=0, validator=rules.at_least(0))  # batch steps; 0: by epochs
    num_iterations: int = field(default=1, validator=rules.at_least(1))  # passes over one rollout
    minibatches: int = field(default=1, validator=rules.at_least(1))  # updates a pass
    max_bad_updates: int = field(default=10, validator=rules.at_least(0))  # in a row; 0: without end
    shard: bool = False  # over the ranks: masters and moments, for full fine-tuning


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class EvalConfig:
    """[eval]: greedy exact match on data.eval_split."""

    every: int = field(default=0, validator=rules.at_least(0))  # updates; 0: at the start and the end only
    samples: int = field(default=200, validator=rules.at_least(0))  # 0: all
    max_new_tokens: int = field(default=0, validator=rules.at_least(0))  # 0: rollout.max_new_tokens
    at_start: bool = True


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class CheckpointConfig:
    """[checkpoint]: how often, and how many stay."""

    every: int = field(default=100, validator=rules.at_least(0))  # batch steps; 0: only final/
    keep_last: int = field(default=3, validator=rules.at_least(0))  # 0: all
    keep_best: int = field(default=1, validator=rules.at_least(0))
    on_error: OnSaveError = "continue"  # if a checkpoint or a line of the log cannot be written


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class LogConfig:
    """[log]: which logs are written, and which dashboards get them."""

    every: int = field(default=1, validator=rules.at_least(1))  # updates
    jsonl: bool = True
    completions: bool = True
    tokens: TokenLog = "none"
    report: bool = True
    tensorboard: bool = False
    wandb: bool = False
    trackio: bool = False
    project: str = field(default="grpo_fn", validator=rules.text())  # of W&B and Trackio
    entity: str = ""  # of W&B: a user or a team; empty: the account's own
    run_name: str = ""  # in these two; empty: run.name
    table_rows: int = field(default=8, validator=rules.at_least(0))  # completions of a batch step they show


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class WatchConfig:
    """[watch]: when a line warns that training goes wrong."""

    patience: int = field(default=10, validator=rules.at_least(0))  # updates in a row; 0: no warnings
    min_entropy: float = field(default=0.001, validator=rules.not_negative())  # nats a token; 0: off
    max_kl: float = field(default=10.0, validator=rules.not_negative())  # nats a token; 0: off


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class StopConfig:
    """[stop]: conditions that end a run before its last step."""

    when: tuple[str, ...] = field(
        default=(), validator=rules.each_text()
    )  # runners.telemetry.run_watch.Condition


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class EnvConfig:
    """[env]: what answers the model's turns; without factory and tools completions have one turn."""

    factory: str = ""  # a class with reset(**row), or "calculator", nanochat's; empty: none
    tools: tuple[str, ...] = field(default=(), validator=rules.each_text())  # plain functions
    max_turns: int = field(default=8, validator=rules.at_least(1))  # of the model, a conversation
    max_tool_calls: int = field(default=0, validator=rules.at_least(0))  # a conversation; 0: any number
    max_observation_tokens: int = field(default=512, validator=rules.at_least(1))  # of one call's result
    timeout: float = field(default=30.0, validator=rules.not_negative(rules.HUGE))  # seconds; 0: none
    workers: int = field(default=32, validator=rules.at_least(1))  # threads that calls run in
    on_error: OnToolError = "observation"  # of a call that fails
    schedule: TurnSchedule = "together"  # when turns continue; arrival: as soon as a reply is there

    @property
    def answers(self) -> bool:
        """Whether anything answers the model's turns."""
        return bool(self.factory or self.tools)


@attrs.frozen(kw_only=True, field_transformer=rules.check_choices)
class SystemConfig:
    """[system]: how the machine is used."""

    compile: bool = True
    grad_checkpoint: bool = False
    memory_limit_gb: float = field(default=0.0, validator=rules.not_negative(rules.HUGE))  # 0: MLX's own
    micro_batch_tokens: int = field(default=0, validator=rules.at_least(0))  # of the learner; 0: by the model
    share_prompts: SharePrompts = "auto"  # compute a group's prompt once in the learner; auto: on CPU
    collective_timeout: float = field(default=600.0, validator=rules.above(0, rules.HUGE))  # seconds
    check_model: bool = True  # compare what decodes with what is trained, before the first rollout
    disable: tuple[str, ...] = field(default=(), validator=rules.each_once())  # mechanisms, by name
