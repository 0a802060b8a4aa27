"""The config's keys: each class is a table of the TOML file, and each line is a key with its
default, its meaning in Markdown, and its range. docs/config.md and `grpo-run --explain` are
generated from them."""

import json
from pathlib import Path
from typing import Any, Literal

import attrs

from runners.answers.forms import FORMS
from runners.answers.thoughts import TAGS
from runners.config.names import REWARD_NAMES
from runners.config.rules import LONG, key

Stored = Literal["float32", "bfloat16"]
QuantizationMode = Literal[
    "none", "affine-8", "affine-6", "affine-4", "affine-3", "mxfp8", "mxfp4", "nvfp4"
]
Storage = Literal["dequantized", "packed"]

_KINDS = {
    "string": str,
    "number": float,
    "true or false": bool,
    "list of 2 numbers": tuple[float, float],
}
_LOSS = json.loads((Path(__file__).parent / "loss_keys.json").read_text(encoding="utf-8"))
"""The keys of grpo_fn.LossSpec, as JSON because loading a config must not import MLX. `python
docs/manual/written.py` writes the file, and a test checks that it is current."""
_LossKeys: Any = attrs.make_class(
    "_LossKeys",
    {
        name: key(
            "grpo" if name == "preset" else None,
            stated["meaning"],
            stated["range"],
            tuple(stated["choices"]),
            type=str if name == "preset" else _KINDS[stated["type"]] | None,
        )
        for name, stated in _LOSS.items()
    },
    frozen=True,
    kw_only=True,
)


# fmt: off
@attrs.frozen(kw_only=True)
class RunConfig:
    """[run]: where a run's files are written: `output_dir/name`."""

    name: str = key("grpo", "name of the run, whose folder is `output_dir/name`", "a relative folder name, no `..`")
    output_dir: str = key("outputs", "folder that contains all runs", "one line, not empty")
    seed: int = key(0, "seed for the prompt order, the sampling and the adapters' initial values; runs with different seeds share no random numbers", "0 <= x <= 9223372036854775807")
    overwrite: bool = key(False, "replace a finished run in the same folder: its checkpoints and model are deleted, but its logs are kept as `*.previous.jsonl`. To replace an interrupted run, use `--overwrite` on the command line")


@attrs.frozen(kw_only=True)
class LoraConfig:
    """[model] lora: mlx-lm's adapters, used with tune = "lora" or "dora"."""

    rank: int = key(8, "rank of the adapters", ">= 1")
    scale: float = key(20.0, "factor applied to the adapters' output (mlx-lm's `scale`)", "> 0")
    layers: int = key(-1, "number of blocks with adapters, counted from the last block; -1: all blocks", "-1 or >= 1")
    keys: tuple[str, ...] = key((), 'names of the layers to adapt, such as `"self_attn.q_proj"`; empty: mlx-lm\'s default', "no empty string")


@attrs.frozen(kw_only=True)
class ModelConfig:
    """[model]: what is trained, and in which precision."""

    path: str = key(attrs.NOTHING, '`"embedded"` or `"embedded-tools"` (the small models in the package), a model folder in the format that mlx-lm (or [nanochat](nanochat.md)) writes, or the name of a model on the Hub', "one line, not empty")
    tune: Literal["full", "lora", "dora"] = key("full", "what is trained: all weights (`full`), or only adapters (`lora`, `dora`)")
    lora: LoraConfig = attrs.field(factory=LoraConfig)
    adapters: str = key("", 'folder with the adapters to resume from, in mlx-lm\'s or PEFT\'s format, such as another run\'s `final`. Their rank, scale, layers and keys replace those in `lora`, and the KL term (`loss.beta`) is measured against them. `tune` must be `"lora"` or `"dora"`, whichever the adapters are; empty: new adapters')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "dtype of the computation; `auto`: float32 on a CPU, otherwise the model's own dtype. On a CPU, the experts' layers always compute in float32")
    master: Stored = key("float32", "dtype of the weights that the optimizer updates; bfloat16 uses stochastic rounding: [when to choose it](memory.md#weights-in-bfloat16)")
    trust_remote_code: bool = key(False, "run Python code that comes with the model")
    loader: str = key("", "custom function that loads the model folder, `package.module:function` or `path/to/file.py:function`; empty: mlx-lm's loader. See [own model](own-model.md)")


@attrs.frozen(kw_only=True)
class DataConfig:
    """[data]: questions, answers and the prompt format."""

    source: str = key("openai/gsm8k", '`"embedded"` or `"embedded-tools"`, a file or folder (.jsonl, .json, .csv, .parquet), the name of a data set on the Hub, or `"reasoning-gym:TASK"` ([tasks](your-task.md#reasoning-gym)); an existing path takes precedence', "one line, not empty")
    name: str = key("", "configuration of a Hub data set; for `openai/gsm8k`, empty means `main`. For a reasoning-gym task: its settings, as a JSON object")
    split: str = key("train", "training split; if the source is a folder: the file with this name, or its shards", "one line, not empty")
    eval_split: str = key("test", "evaluation split; if it equals `split`, or the source is a single file, the last tenth of the rows (1 to 1,000) is held out", "one line, not empty")
    question: str = key("question", "column that contains the question", "one line, not empty")
    answer: str = key("answer", "column that contains the reference answer: the text after the last `####`, or the whole text if there is no `####`. If the column is empty or does not exist, the data has no reference answers, and completions must be scored by your own [rewards](rewards.md#your-own) or an [environment](turns.md#an-environment)")
    completion: str = key("", "column that contains the reference completion for [supervised updates](cold-start.md#supervised-updates): a string, or a list of messages that ends with an assistant message (if `prompt` names the same column, the earlier messages are the prompt); empty: the full text of `answer`")
    prompt: str = key("", "column that contains a complete prompt, a list of messages or a string, which replaces `question`: see [turns](turns.md#messages); empty: none")
    image: str = key("", "column that contains images for vision-language models, as bytes or as paths relative to the data: see [images](vision.md); empty: none")
    image_folder: str = key("", "folder that image paths are relative to; no path may lead outside it; empty: the data's folder")
    image_max_pixels: int = key(0, "images with more pixels than this are scaled down; 0: the limit of the model's processor", ">= 0")
    system_prompt: str = key(FORMS["xml"].instruction, "system message; empty: none. If not set: instructions to answer in the format of `answer.form` (shown: those for `xml`), or none if `data.prompt` is set")
    nudge: str = key("<reasoning>", "first words of every completion: they are appended to the prompt, and rewards and evaluation see them as part of the completion. If not set: the default for `answer.form`, or none if `data.prompt` is set")
    thoughts: tuple[str, ...] = key(TAGS, "opening and closing tags of the model's reasoning. Answers, formats and tool calls inside the tags are ignored; a completion that is cut off inside them has no answer. `[]`: the whole completion is read. See [thoughts](your-task.md#thoughts)", "an opening and a closing tag, or nothing")
    chat_template_kwargs: dict[str, bool | int | float | str] = key({}, "extra arguments for the chat template, such as `{enable_thinking = false}`", "arguments that the template itself reads", hash=False)
    chat_template: str = key("", "file that contains the chat template, in the Jinja format of transformers; it is saved with the run's models. Empty: the model's own template")
    prompt_form: Literal["chat", "raw"] = key("chat", "`chat`: prompts use the chat template; `raw`: a prompt is plain text that the model continues, without chat template, roles or system prompt, for [base models](own-data.md#base-models)")
    max_samples: int = key(0, "number of rows to train on, counted from the start of the data; 0: all", ">= 0")
    max_prompt_length: int = key(512, "prompts longer than this many tokens are skipped and counted", ">= 1")
    on_bad_row: Literal["raise", "skip"] = key("raise", "if a row has no question or no answer: stop the run (`raise`), or skip and count the row (`skip`)")
    curriculum: Literal["none", "static", "adaptive"] = key("none", "how prompts are sampled. `none`: all of them, shuffled. `static`: only those with a medium pass rate in `data.difficulty`, from easy to hard. `adaptive`: weighted by pass rates that are estimated during the run. See [curriculum](cold-start.md#prompts-by-pass-rate)")
    difficulty: str = key("", "file of pass rates, written by `grpo difficulty`: required for `static`, used as initial estimates by `adaptive`; empty: none")
    pass_rates: tuple[float, float] = key((0.05, 0.95), "with `static`: prompts whose pass rate is unknown or outside this range are skipped and counted", "0 <= low < high")
    target_rate: float = key(0.5, "with `adaptive`: prompts whose pass rate is near this value are sampled most often", "0 < x < 1")
    rate_decay: float = key(0.98, "with `adaptive`: factor by which each prompt's statistics decay per batch step", "0 < x < 1")
    explore: float = key(0.2, "with `adaptive`: share of prompts that are taken from the whole data set in its usual order, whatever their pass rate", "0 <= x <= 1")
    pass_reward: float = key(1.0, "a completion passes if its combined reward is at least this value; if `correctness_reward_func` is one of the rewards, it passes if its answer is right, whatever the combined reward")
    transform: str = key("", "custom function that takes a row and returns a row, `package.module:function` or `path/to/file.py:function`: see [own data](own-data.md); empty: none")


@attrs.frozen(kw_only=True)
class AnswerConfig:
    """[answer]: how the answer is read from a completion, and when it is right: see [your task](your-task.md)."""

    form: str = key("xml", "where the answer appears in a completion: `xml` (in `<answer>` tags), `last_number`, `boxed` (`\\boxed{}`), `gsm8k` (after `####`), `letter`, `json:FIELD`, `exact` (the whole text), `code` (a Python program; the answer column contains its [tests](your-task.md#code-with-tests)), `regex:PATTERN` (the pattern's group), `file.py:function` (takes the text and returns the answer or None); `none`: no answer. If not set: `xml`, or `none` if all rewards are your own or the data has no answers", "one line, not empty")
    ignore_case: bool = key(False, "ignore case when comparing answers; with `exact`, also ignore a final full stop")
    ignore_spaces: bool = key(False, "ignore spaces and line breaks when comparing answers")
    program_seconds: int = key(2, 'processor time, in seconds, that a program of `form = "code"` may use for all of its tests; its wall time may be 5 times as long', ">= 1")
    partial_sandbox: bool = key(False, 'run programs of `form = "code"` even if part of their [sandbox](your-task.md#code-with-tests) is unavailable on this machine; `grpo doctor` shows which part')


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """[rollout]: how completions are sampled."""

    num_generations: int = key(8, "completions per prompt (the group size G)", ">= 2")
    first_stage: int = key(0, "sample this many completions per prompt first, and the rest of the group only if their rewards differ; 0: sample the whole group at once. The completions themselves are the same either way: see [curriculum](cold-start.md#two-stages)", "0 or >= 2")
    max_new_tokens: int = key(512, "maximum length of a completion, in tokens; also L_max of the `constant` aggregation", ">= 1")
    temperature: float = key(1.0, "sampling temperature; the learner divides its logits by the same value", "> 0")
    top_p: float = key(1.0, "applied second: keep the smallest set of tokens that holds at least this share of the probability left after `top_k`; 1: keep all", "0 < x <= 1")
    top_k: int = key(0, "applied first: keep only this many tokens, the most likely ones; 0: keep all. The learner's log-probabilities always use the whole distribution: see [algorithms](algorithms.md#around-the-loss)", ">= 0")
    min_p: float = key(0.0, "applied third: keep tokens whose probability is at least this fraction of the highest one; 0: keep all", "0 <= x < 1")
    stop: tuple[str, ...] = key((), "strings that end a completion, at the token that completes one of them", "no empty string")
    quantization: QuantizationMode = key("none", "format in which the sampler's weights are quantized; the learner's weights are not quantized: see [quantization.md](quantization.md)")
    storage: Storage = key("dequantized", "how quantized weights are stored: `dequantized` (faster) or `packed` (less memory); used with `quantization`")
    group_size: int = key(0, "group size of affine formats (weights per scale), for the sampler and the reference model; 0: 64", "0 or 32 or 64 or 128")
    quantize_head: bool = key(False, "also quantize the embeddings and the output head of the sampler and the reference model")
    calibration: Literal["none", "activations"] = key("activations", "how weights are rounded to affine formats of at most 6 bits, in the sampler and the reference model. `activations`: so that the outputs of each layer change little, measured on its inputs in the first rollout, which runs in full precision; `none`: each weight to the nearest value")
    bits_budget: float = key(0.0, "with `calibration`: average bits per weight of the sampler, including scales. Each layer uses an affine format of 3 to 8 bits; the more its rounding changes the log-probabilities of the first rollout, the more bits it uses. 0: all layers use `quantization`", "0 or 3.5 <= x <= 9")
    mismatch_limit: float = key(0.2, "a quantized sampler switches to a finer format, and finally to full precision, if its KL divergence from the learner exceeds this limit (in nats per token) or the effective sample size falls below one half; 0: never", ">= 0")
    launch: Literal["auto", "eval", "async"] = key("auto", "how decoding steps are sent to the device. `eval`: wait for a step before sending the next one; `async`: send the next step while the current one runs, which copies the KV cache; `auto`: `eval` on a CPU, `async` on a GPU")
    check_every: int = key(8, "number of decoding steps between two checks for finished completions", ">= 1")
    max_staleness: int = key(0, "sample and score rollouts up to this many updates in advance, while the learner works, with weights that are up to this many updates old; requires a `loss.correction`. 0: sampling and learning alternate. See [rollouts ahead](ahead.md)", "0 <= x <= 4")
    max_batch: int = key(0, "maximum number of completions decoded together, in whole groups; 0: as many as fit in memory", ">= 0")

    def group_size_of(self, quantization: str) -> int:
        """Returns the group size for a format: `group_size` if the format leaves the choice,
        otherwise 0 for the format's own.
        """
        return self.group_size if quantization.startswith("affine") else 0


@attrs.frozen(kw_only=True)
class RewardConfig:
    """[reward]: functions (a name, package.module:function, file.py:function) and their weights."""

    functions: tuple[str, ...] = key(REWARD_NAMES, "reward functions: built-in names, `package.module:function` or `path/to/file.py:function`; see [rewards.md](rewards.md). If not set, the default depends on `answer.form`: all five built-in functions with `xml`, otherwise only the first. `[]` requires an `env.factory` that has `get_reward`", "none twice")
    weights: tuple[float, ...] = key((), "weight of each function; at least one must be nonzero; empty: 1.0 each")
    aggregate: Literal["sum_then_normalize", "normalize_then_sum"] = key("sum_then_normalize", "`sum_then_normalize`: add the rewards, then compute advantages; `normalize_then_sum`: first normalise each reward within its group (GDPO)")
    timeout: float = key(60.0, "time limit for one call of a reward function, in seconds; 0: no limit, and reward functions run in the run's own process", LONG)
    on_error: Literal["skip", "raise"] = key("skip", "if a reward fails: skip and report it (`skip`), or stop the run (`raise`)")
    stop_if_all_fail: bool = key(True, 'with `on_error = "skip"`: stop the run if a reward fails for every completion of a batch step; see [troubleshooting](troubleshooting.md#rewards)')


@attrs.frozen(kw_only=True)
class OverlongConfig:
    """[loss] overlong: DAPO's penalty on completions close to the length limit."""

    buffer: int = key(0, "the length penalty starts this many tokens before the length limit; 0: no penalty. Without the `overlong` table, the preset's value is used", ">= 0")
    penalty: float = key(1.0, "the length penalty of a completion at the length limit; before it, the penalty grows linearly", ">= 0")


@attrs.frozen(kw_only=True)
class LossConfig(_LossKeys):
    """[loss]: a preset, overrides of its values, and the steps around the loss. `Config.check` replaces None by the preset's value."""

    router_aux_coef: float = key(0.0, "for models with experts: coefficient of the load-balancing loss; see [models](models.md#experts)", ">= 0")
    router_replay: bool = key(False, "for models with experts: the learner uses the experts that the sampler chose; see [models](models.md#router-replay)")
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "turn"] | None = key(None, "value that is subtracted from each reward: the mean reward of its group (`group_mean`), of the group's other completions (`leave_one_out`) or of the batch step (`batch_mean`). `turn` (GiGPO, with [env]): as `group_mean`, and each turn's return is also reduced by a baseline: see [credit for turns](algorithms.md#credit-for-turns)")
    discount: float = key(1.0, "with [env]: discount factor γ for the return of each turn: a reward k turns later is multiplied by γᵏ", "0 <= x <= 1")
    scale: Literal["group", "batch", "none"] | None = key(None, "what the difference between reward and baseline is divided by: the standard deviation of the `group` or of the `batch`, or nothing (`none`)")
    mask_truncated_completions: bool = key(False, "exclude from the loss all completions that reach the length limit")
    dynamic_sampling: bool | None = key(None, "replace prompts for which all completions receive the same reward")
    max_resample: int = key(3, "with `dynamic_sampling`: maximum number of rounds in which prompts are replaced, per batch step", ">= 0")
    overlong: OverlongConfig | None = None
    top_entropy_quantile: float = key(1.0, "share of the tokens that the policy term uses: those with the highest entropy; 1: all", "0 < x <= 1")
    sync_every: int = key(1, "number of batch steps after which the sampler receives the learner's weights; this happens only at updates", ">= 1")
    ref_sync_every: int = key(0, "number of batch steps after which the reference model is moved towards the policy (see `ref_mixup`); requires `beta` > 0. 0: never", ">= 0")
    ref_mixup: float = key(0.6, "α in the reference model's update: reference ← α·policy + (1 − α)·reference", "0 < x <= 1")
    ref_quantization: QuantizationMode = key("none", 'format in which the reference model is quantized; used with `beta` > 0 and `tune = "full"`')
    ref_storage: Storage = key("packed", "how the quantized reference model is stored, as in `rollout.storage`; the default is `packed` because the only reason to quantize a reference model is to save memory")


@attrs.frozen(kw_only=True)
class TeacherConfig:
    """[teacher]: a model that scores each token of the student's completions: see [a teacher](cold-start.md#a-teacher)."""

    path: str = key("", 'folder or Hub name of the teacher, quantized or not; it must have the student\'s vocabulary. `"self"`: the student as it is at the start of the run (requires a `hint`); empty: no teacher')
    form: Literal["reward", "loss"] = key("reward", "how the student learns from the reverse KL (from student to teacher). `reward`: it is estimated at each sampled token and added to the token's advantage; `loss`: it is computed exactly, over the whole vocabulary, and added to each token's loss")
    weight: float = key(1.0, "coefficient of the reverse KL", "> 0")
    task_weight: float = key(1.0, "coefficient of the advantages from rewards; 0: learn only from the teacher", ">= 0")
    hint: str = key("", 'text containing `{answer}` that is appended to the question in the teacher\'s prompt, but not in the student\'s; required with `path = "self"`')


@attrs.frozen(kw_only=True)
class OptimConfig:
    """[optim]: AdamW and the amount of training."""

    learning_rate: float = key(1e-06, "AdamW's learning rate at the peak of the schedule", ">= 0")
    schedule: Literal["cosine", "linear", "constant"] = key("cosine", "learning rate after the warm-up: it decays to 0 over the updates (`cosine`, `linear`) or stays constant")
    warmup_ratio: float = key(0.1, "share of all updates in which the learning rate rises to its peak; it is above 0 from the first update on", "0 <= x <= 1")
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW's betas", "each: 0 <= x < 1")
    eps: float = key(1e-08, "AdamW's epsilon", "> 0")
    weight_decay: float = key(0.0, "decoupled weight decay, applied to every trained weight", ">= 0")
    moments: Stored = key("float32", "dtype of AdamW's two moments; bfloat16 uses stochastic rounding: [memory](memory.md#weights-in-bfloat16)")
    max_grad_norm: float = key(1.0, "clip the gradient to this global norm; 0: no clipping", ">= 0")
    batch_size: int = key(1, "prompts (not completions) per batch step", ">= 1")
    gradient_accumulation_steps: int = key(1, "batch steps per update", ">= 1")
    num_epochs: int = key(1, "passes over the training data", ">= 1")
    max_steps: int = key(0, "total number of batch steps; 0: `num_epochs` determines it", ">= 0")
    num_iterations: int = key(1, "number of times that each rollout is used for updates (μ in the GRPO paper)", ">= 1")
    minibatches: int = key(1, "number of updates per pass over a rollout, which is split into this many parts; at most `batch_size` × `rollout.num_generations`", ">= 1")
    max_bad_updates: int = key(10, "stop the run after this many consecutive updates with NaN or infinite values; 0: never; see [troubleshooting](troubleshooting.md)", ">= 0")


@attrs.frozen(kw_only=True)
class SftConfig:
    """[sft]: supervised updates on reference completions, before GRPO or without it: see [supervised updates](cold-start.md#supervised-updates)."""

    updates: int = key(0, "supervised updates before GRPO; 0: `epochs` determines the number", ">= 0")
    epochs: int = key(0, "passes over the reference completions before GRPO; if this and `updates` are both 0, there are no supervised updates", ">= 0")
    only: bool = key(False, "stop after the supervised updates, as `grpo sft` does; `epochs` is then 1 by default")
    completions: str = key("", "a run's folder, or a file in the format of its `completions.jsonl`; the prompts and completions in it replace `data.completion`; empty: none")
    min_reward: float = key(1.0, "use only those `completions` whose reward is at least this")
    learning_rate: float = key(1e-05, "AdamW's learning rate for supervised updates, at the peak of `optim.schedule`; GRPO restarts the schedule", ">= 0")
    batch_size: int = key(0, "reference completions per batch step; 0: the number of completions that GRPO samples, `optim.batch_size` × `rollout.num_generations`", ">= 0")

    @property
    def is_on(self) -> bool:
        """Whether there are supervised updates."""
        return self.only or self.updates + self.epochs > 0


@attrs.frozen(kw_only=True)
class EnvConfig:
    """[env]: the tools, environment or program that replies to the model's turns. Without any of them, completions have one turn."""

    factory: str = key("", "a class with a `reset` method, `package.module:Class` or `path/to/file.py:Class`; its public methods are the tools; empty: none")
    tools: tuple[str, ...] = key((), "functions to use as tools: `package.module:function`, `path/to/file.py:function`, or just a file, for all of its public functions", "no empty string")
    program: tuple[str, ...] = key((), 'a command that runs one episode, such as `["python", "agent.py"]`: it calls the model at `OPENAI_BASE_URL` and prints the episode\'s reward; see [agents](agents.md)', "no empty string")
    taskset: str = key("", 'a taskset of the verifiers library, `"verifiers:ID"`: its tasks are the data, its harness runs the episodes, and its rewards score them; see [agents](agents.md)')
    max_turns: int = key(8, "maximum number of model turns in a conversation; tool calls in the last turn are not executed. For a program: maximum number of model calls", ">= 1")
    max_tool_calls: int = key(0, "maximum number of tool calls in a conversation; every further call returns an error; 0: no limit", ">= 0")
    max_observation_tokens: int = key(512, "a tool's result is truncated to this many tokens", ">= 1")
    timeout: float = key(30.0, "time limit, in seconds, for a `reset` or for all calls of a turn together; for a program: for the time between two of its model calls; 0: no limit", LONG)
    workers: int = key(32, "maximum number of concurrent calls (each in a thread) or programs; coroutines are not limited", ">= 1")
    on_error: Literal["observation", "no_reward"] = key("observation", "if a call fails or times out: show the model the error (`observation`), or end the conversation without a reward (`no_reward`)")
    schedule: Literal["together", "arrival"] = key("together", "when conversations continue. `together`: once no completion is still being decoded, so results are reproducible; `arrival`: each conversation continues as soon as its reply arrives")

    @property
    def answers(self) -> bool:
        """Whether completions are conversations."""
        return bool(self.factory or self.tools or self.agents)

    @property
    def agents(self) -> bool:
        """Whether external programs run the conversations and call the model."""
        return bool(self.program or self.taskset)


@attrs.frozen(kw_only=True)
class EvalConfig:
    """[eval]: greedy exact match on data.eval_split."""

    every: int = key(0, "updates between evaluations; 0: evaluate only at the start and the end", ">= 0")
    samples: int = key(200, "number of problems, the same ones for each evaluation; 0: all", ">= 0")
    max_new_tokens: int = key(0, "maximum length of a completion, in tokens; 0: the same as in the rollout", ">= 0")
    at_start: bool = key(True, "evaluate before the first step")


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """[checkpoint]: how often checkpoints are written, and how many are kept."""

    every: int = key(100, "batch steps between checkpoints; 0: write only `final/`", ">= 0")
    keep_last: int = key(3, "number of most recent checkpoints to keep; 0: keep all, whatever `keep_best` is", ">= 0")
    keep_best: int = key(1, "number of best checkpoints to keep in addition; they are ranked by exact match, then by the reward on held-out problems, then by the training reward; 0: none, and no `best/`", ">= 0")
    on_error: Literal["continue", "stop"] = key("continue", "if a checkpoint or log entry cannot be written: continue training and retry (`continue`), or stop the run (`stop`)")


@attrs.frozen(kw_only=True)
class LogConfig:
    """[log]: which logs are written, and to which dashboards."""

    every: int = key(1, "number of updates between log entries; the last update is always logged", ">= 1")
    jsonl: bool = key(True, "write [`training_log.jsonl`](report.md#the-files)")
    completions: bool = key(True, "write [`completions.jsonl`](rewards.md#completionsjsonl), with the prompt, text, rewards, advantage and length of every completion, and [`evaluations.jsonl`](report.md#evaluationsjsonl)")
    report: bool = key(True, "write [`report.html`](report.md) to the run's folder when the run ends")
    tensorboard: bool = key(False, "also log to TensorBoard (requires `tensorboardX`)")
    wandb: bool = key(False, "also log to Weights & Biases (requires `wandb`)")
    project: str = key("grpo_fn", "W&B project", "one line, not empty")
    entity: str = key("", "W&B user or team; empty: the account's default")
    run_name: str = key("", "the run's name in W&B; empty: `run.name`")


@attrs.frozen(kw_only=True)
class WatchConfig:
    """[watch]: when to warn that training goes wrong."""

    patience: int = key(10, "warn after this many consecutive updates in which all rewards are equal within each group, or in which one of the two limits below is crossed; 0: no warnings, not even if a run has [become worse](troubleshooting.md)", ">= 0")
    min_entropy: float = key(0.001, "warn if the entropy is below this, in nats per token, because completions then hardly differ; 0: off", ">= 0")
    max_kl: float = key(10.0, "warn if the KL is above this, in nats per token, because the policy is then far from the reference model; 0: off", ">= 0")


@attrs.frozen(kw_only=True)
class StopConfig:
    """[stop]: conditions that end a run before its last step."""

    when: tuple[str, ...] = key((), 'conditions such as `"em >= 0.95"` or `"kl > 0.5 for 20"` (20 consecutive readings); the run ends when the first of them is met', "no empty string")
    patience: int = key(0, "end a run that has [become worse](troubleshooting.md) and does not recover within this many updates; 0: never", ">= 0")


@attrs.frozen(kw_only=True)
class RanksConfig:
    """[ranks]: what the processes of `mlx.launch` do: see [many devices](many-devices.md)."""

    samplers: int = key(0, "number of ranks that only sample: all except rank 0, which only learns; requires `rollout.max_staleness` >= 1. 0: each rank samples and learns. See [samplers apart](many-devices.md#samplers-apart)", ">= 0")


@attrs.frozen(kw_only=True)
class SystemConfig:
    """[system]: memory and speed on this machine."""

    compile: bool = key(True, "compile the learner's steps; `false` makes debugging easier. On CUDA, compiled steps do not fuse operations")
    grad_checkpoint: bool = key(False, "recompute each block in the backward pass, which needs less memory but more time")
    memory_limit_gb: float = key(0.0, "MLX's memory limit, in 10⁹ bytes; 0: MLX's default", LONG)
    swap_limit_gb: float = key(0.0, "save and stop the run once the system has swapped out this much more than at the start, in 10⁹ bytes. 0: on a Mac, half of its memory, but at most half of the free disk space; elsewhere, no limit. See [Mac](memory.md#on-a-mac)", LONG)
    micro_batch_tokens: int = key(0, "tokens per micro-batch of the learner; affects memory and speed, but not the update. 0: chosen automatically. On a CPU: as many tokens as need 75 MB of activations, but at least 256, and at least one prompt with three completions. On Metal: 8,192, or fewer if a micro-batch takes over 2 s. On CUDA: 16,384 to 65,536 (more for smaller models), as long as the gradient then needs less than half of the memory. On Metal and CUDA, the number is halved until the gradient needs at most 85 % of the memory", ">= 0")
    share_prompts: Literal["auto", "always", "never"] = key("auto", "whether the learner computes a group's prompt once instead of once per completion. `auto`: on a CPU, if the model supports it (plain key-value caches, no `grad_checkpoint`); `always` is an error if the model does not support it")
    collective_timeout: float = key(600.0, "how long ranks wait for each other, in seconds, before the run stops with a message that names the missing ranks; see [many devices](many-devices.md)", "0 < x <= 1e9")
    check_model: bool = key(True, "before the first rollout, check on a few tokens of the run's prompts that the sampler and the learner compute the same log-probabilities: see [models](models.md#what-a-run-checks)")
    disable: tuple[str, ...] = key((), 'speed or memory mechanisms to turn off, such as `["shared_prefix", "merged_adapters"]`, to measure a mechanism\'s gain or rule it out as a cause; results are the same up to rounding. [architecture](architecture.md#speed-and-memory) lists the names', "none twice")
