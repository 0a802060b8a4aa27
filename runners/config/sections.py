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
Aggregate = Literal["sum_then_normalize", "normalize_then_sum"]
Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "turn"]
Scale = Literal["group", "batch", "none"]
ScheduleName = Literal["cosine", "linear", "constant"]

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

    name: str = key("grpo", "the run's folder is `output_dir/name`", "a relative folder name, no `..`")
    output_dir: str = key("outputs", "folder that contains all runs", "one line, not empty")
    seed: int = key(0, "seed of the prompt order, the sampling and the adapters' initial values; runs with different seeds share no random numbers", "0 <= x <= 9223372036854775807")
    overwrite: bool = key(False, "replace a finished run in the same folder: its checkpoints and model are deleted, and its logs are kept as `*.previous.jsonl`. Only `--overwrite` on the command line replaces an interrupted run")


@attrs.frozen(kw_only=True)
class LoraConfig:
    """[model] lora: mlx-lm's adapters, used with tune = "lora" or "dora"."""

    rank: int = key(8, "rank of the adapters", ">= 1")
    scale: float = key(20.0, "factor applied to the adapters' output (mlx-lm's `scale`)", "> 0")
    layers: int = key(-1, "number of blocks with adapters, counted from the last; -1: all", "-1 or >= 1")
    keys: tuple[str, ...] = key((), 'names of the layers to adapt, such as `"self_attn.q_proj"`; empty: mlx-lm\'s default', "no empty string")


@attrs.frozen(kw_only=True)
class ModelConfig:
    """[model]: what is trained, and in which precision."""

    path: str = key(attrs.NOTHING, '`"embedded"` or `"embedded-tools"` (the small models in the package), a model folder in mlx-lm\'s format (or [nanochat](nanochat.md)\'s), or a Hub name', "one line, not empty")
    tune: Literal["full", "lora", "dora"] = key("full", "what is trained: all weights, or only adapters")
    lora: LoraConfig = attrs.field(factory=LoraConfig)
    adapters: str = key("", 'folder with adapters to resume from, in mlx-lm\'s or PEFT\'s format, such as another run\'s `final`. Their rank, scale, layers and keys replace `lora`, and the KL term of `loss.beta` is measured against them. Requires `tune = "lora"` or `"dora"`, to match the adapters; empty: new adapters')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "dtype of the computation; auto: float32 on a CPU, otherwise the model's own. On a CPU, experts are always multiplied in float32")
    master: Stored = key("float32", "dtype of the weights that the optimizer updates; bfloat16 uses stochastic rounding: [when to choose it](memory.md#weights-in-bfloat16)")
    trust_remote_code: bool = key(False, "run Python code shipped with a model")
    loader: str = key("", "custom function that loads the model folder, `package.module:function` or `path/to/file.py:function`: see [own model](own-model.md); empty: mlx-lm")


@attrs.frozen(kw_only=True)
class DataConfig:
    """[data]: questions, answers and the prompt format."""

    source: str = key("openai/gsm8k", '`"embedded"` or `"embedded-tools"`, a file or folder (.jsonl, .json, .csv, .parquet), a Hub name, or `"reasoning-gym:TASK"` ([tasks](your-task.md#reasoning-gym)); an existing path takes precedence', "one line, not empty")
    name: str = key("", "configuration of a Hub data set; empty means `main` for `openai/gsm8k`. For a reasoning-gym task: a JSON object with its settings")
    split: str = key("train", "training split; if the source is a folder: the file of this name, or its shards", "one line, not empty")
    eval_split: str = key("test", "evaluation split; if it equals `split`, or the source is a single file, the last tenth of the rows (1 to 1,000) is held out", "one line, not empty")
    question: str = key("question", "column with the question", "one line, not empty")
    answer: str = key("answer", "column with the reference answer: the text after its last `####`, or the whole text if it has none. If it is empty, or the column does not exist, the data has no reference answers, and your own [rewards](rewards.md#your-own) or an [environment](turns.md#an-environment) must score completions")
    completion: str = key("", "column with the reference completion for [supervised updates](cold-start.md#supervised-updates): a text, or a list of messages that ends with the assistant's (if `prompt` names the same column, the earlier messages are the prompt); empty: the full text of `answer`")
    prompt: str = key("", "column with a complete prompt, a list of messages (or a text), used instead of `question`: see [turns](turns.md#messages); empty: none")
    image: str = key("", "column with images, as bytes or as paths relative to the data, for vision-language models: see [images](vision.md); empty: none")
    image_folder: str = key("", "folder that image paths are relative to and must stay inside; empty: the data's folder")
    image_max_pixels: int = key(0, "larger images are scaled down to this number of pixels; 0: the limit of the model's processor", ">= 0")
    system_prompt: str = key(FORMS["xml"].instruction, "system message; empty: none. If not set, a prompt that requests `answer.form` (shown: the prompt for `xml`), or none with `data.prompt`")
    nudge: str = key("<reasoning>", "first words of every completion, appended to the prompt; rewards and evaluation also see them. If not set, determined by `answer.form`; none with `data.prompt`")
    thoughts: tuple[str, ...] = key(TAGS, "opening and closing tag of a model's reasoning. Answers, formats and tool calls inside the tags are ignored; a completion that is cut off inside them has no answer. `[]`: the whole completion is read: see [thoughts](your-task.md#thoughts)", "an opening and a closing tag, or nothing")
    chat_template_kwargs: dict[str, bool | int | float | str] = key({}, "extra arguments for the chat template, such as `{enable_thinking = false}`", "arguments that the template itself reads", hash=False)
    chat_template: str = key("", "file with the chat template to use, in the Jinja format of transformers; it is saved with the run's models. Empty: the model's own")
    prompt_form: Literal["chat", "raw"] = key("chat", "`raw`: a prompt is plain text that the model continues, without chat template, roles or system prompt, for [base models](own-data.md#base-models)")
    max_samples: int = key(0, "number of rows to train on, from the start of the data; 0: all", ">= 0")
    max_prompt_length: int = key(512, "prompts with more tokens are skipped and counted", ">= 1")
    on_bad_row: Literal["raise", "skip"] = key("raise", "stop the run at a row without a question or an answer, or skip and count such rows")
    curriculum: Literal["none", "static", "adaptive"] = key("none", "which prompts are sampled. `none`: all, shuffled. `static`: prompts with a medium pass rate in `data.difficulty`, from easy to hard. `adaptive`: weighted by pass rates that are estimated during the run. See [curriculum](cold-start.md#prompts-by-pass-rate)")
    difficulty: str = key("", "file with pass rates, written by `grpo difficulty`; required for `static`, initial estimates for `adaptive`; empty: none")
    pass_rates: tuple[float, float] = key((0.05, 0.95), "with `static`: prompts without a measured pass rate, or with one outside this range, are skipped and counted", "0 <= low < high")
    target_rate: float = key(0.5, "with `adaptive`: prompts with a pass rate near this value are sampled most often", "0 < x < 1")
    rate_decay: float = key(0.98, "with `adaptive`: decay applied to each prompt's statistics per batch step", "0 < x < 1")
    explore: float = key(0.2, "with `adaptive`: share of prompts that are taken from the whole data set in its usual order, regardless of pass rate", "0 <= x <= 1")
    pass_reward: float = key(1.0, "a completion passes if its combined reward is at least this; if `correctness_reward_func` is one of the rewards, it passes if its answer is right")
    transform: str = key("", "custom function that maps a row to a row, `package.module:function` or `path/to/file.py:function`: see [own data](own-data.md); empty: none")


@attrs.frozen(kw_only=True)
class AnswerConfig:
    """[answer]: how the answer is read from a completion, and when it is right: see [your task](your-task.md)."""

    form: str = key("xml", "the place of the answer in a completion: `xml` (in `<answer>` tags), `last_number`, `boxed` (`\\boxed{}`), `gsm8k` (after `####`), `letter`, `json:FIELD`, `exact` (the whole text), `code` (a Python program; the answer column contains its [tests](your-task.md#code-with-tests)), `regex:PATTERN` (its group), `file.py:function` (a function from a text to its answer or None); `none`: there is no answer. If not set, it is `none` if all rewards are your own or the data has no answers", "one line, not empty")
    ignore_case: bool = key(False, "ignore upper and lower case; with `exact`, also ignore a final full stop")
    ignore_spaces: bool = key(False, "ignore spaces and line breaks")
    program_seconds: int = key(2, "limit on the processor time of a program of `form = \"code\"`, for all of its tests, in seconds; from start to end, it may take 5 times as long", ">= 1")
    partial_sandbox: bool = key(False, "run programs of `form = \"code\"` even if part of their [sandbox](your-task.md#code-with-tests) is unavailable on this machine; `grpo doctor` shows which part")


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """[rollout]: how completions are sampled."""

    num_generations: int = key(8, "completions per prompt, G", ">= 2")
    first_stage: int = key(0, "sample this many completions per prompt first, and the rest of the group only if their rewards differ; 0: sample the whole group at once. The completions themselves are the same either way: see [curriculum](cold-start.md#two-stages)", "0 or >= 2")
    max_new_tokens: int = key(512, "maximum length of a completion, in tokens; L_max of the aggregation `constant`", ">= 1")
    temperature: float = key(1.0, "divisor of the logits, in the sampler and in the learner", "> 0")
    top_p: float = key(1.0, "applied second: keep the smallest set of tokens that holds this share of the probability remaining after `top_k`; 1: all", "0 < x <= 1")
    top_k: int = key(0, "applied first: keep this many tokens; 0: all. The learner's log-probabilities always use the whole distribution: see [algorithms](algorithms.md#around-the-loss)", ">= 0")
    min_p: float = key(0.0, "applied third: keep tokens whose probability is at least this share of the highest one; 0: all", "0 <= x < 1")
    stop: tuple[str, ...] = key((), "a completion ends at the token that completes one of these strings", "no empty string")
    quantization: QuantizationMode = key("none", "quantize the sampler's weights; the learner keeps its own: see [quantization.md](quantization.md)")
    storage: Storage = key("dequantized", "store the quantized weights `dequantized` (faster) or `packed` (less memory); used with `quantization`")
    group_size: int = key(0, "number of weights that share a scale in affine modes, for sampler and reference model; 0: 64", "0 or 32 or 64 or 128")
    quantize_head: bool = key(False, "also quantize the embeddings and the output head, for sampler and reference model")
    calibration: Literal["none", "activations"] = key("activations", "`activations`: affine formats of at most 6 bits, for sampler and reference model, are rounded using the moments of each layer's inputs in the first rollout, which runs in full precision; `none`: round to nearest")
    bits_budget: float = key(0.0, "with `calibration`: average bits per weight of the sampler, including scales. Each layer has an affine format of 3 to 8 bits, with more bits if rounding it changes the log-probabilities of the first rollout more; 0: all layers use `quantization`", "0 or 3.5 <= x <= 9")
    mismatch_limit: float = key(0.2, "a quantized sampler switches to a finer format, and finally to full precision, if its KL divergence from the learner is above this (nats per token) or the effective sample size is below one half; 0: never", ">= 0")
    launch: Literal["auto", "eval", "async"] = key("auto", "`eval`: wait for each decoding step; `async`: prepare the next step meanwhile, which copies the KV cache; auto: `eval` on a CPU, `async` on a GPU")
    check_every: int = key(8, "number of decoding steps between checks for finished completions", ">= 1")
    max_staleness: int = key(0, "maximum number of updates whose rollouts are sampled and scored in advance while the learner works, with weights that are up to this many updates old; requires a `loss.correction`. 0: sampling and learning alternate. See [rollouts ahead](ahead.md)", "0 <= x <= 4")
    max_batch: int = key(0, "maximum number of completions decoded together, in whole groups; 0: as many as fit in memory", ">= 0")

    def group_size_of(self, quantization: str) -> int:
        """The group size for a format: `group_size` if the format leaves the choice, otherwise 0
        for the format's own."""
        return self.group_size if quantization.startswith("affine") else 0


@attrs.frozen(kw_only=True)
class RewardConfig:
    """[reward]: functions (a name, package.module:function, file.py:function) and their weights."""

    functions: tuple[str, ...] = key(REWARD_NAMES, "reward functions: built-in names, `package.module:function` or `path/to/file.py:function`; see [rewards.md](rewards.md). If not set, they follow `answer.form`: all five built-in ones with `xml`, otherwise the first. `[]` requires an `env.factory` that has `get_reward`", "none twice")
    weights: tuple[float, ...] = key((), "weight of each function, not all 0; empty: 1.0 each")
    aggregate: Aggregate = key("sum_then_normalize", "add the rewards, then compute advantages; or normalise each reward within its group first (GDPO)")
    timeout: float = key(60.0, "time limit for one call of a reward function, in seconds; 0: no limit, and the function runs in the run's own process", LONG)
    on_error: Literal["skip", "raise"] = key("skip", "skip and report a reward that fails, or stop the run")
    stop_if_all_fail: bool = key(True, 'with `on_error = "skip"`: stop the run if a reward fails for every completion of a batch step; see [faults.md](troubleshooting.md#rewards)')


@attrs.frozen(kw_only=True)
class OverlongConfig:
    """[loss] overlong: DAPO's penalty on completions close to the length limit."""

    buffer: int = key(0, "the length penalty starts this many tokens before the limit; 0: no penalty; without a table `overlong`: the preset's value", ">= 0")
    penalty: float = key(1.0, "the length penalty at the limit", ">= 0")


@attrs.frozen(kw_only=True)
class LossConfig(_LossKeys):
    """[loss]: a preset, overrides of its values, and the steps around the loss. `Config.check` replaces None by the preset's value."""

    router_aux_coef: float = key(0.0, "for models with experts: coefficient of the load-balancing loss: [models](models.md#experts)", ">= 0")
    router_replay: bool = key(False, "for models with experts: the learner uses the experts that the sampler chose: [models](models.md#router-replay)")
    baseline: Baseline | None = key(None, "baseline that is subtracted from a reward; `turn` (GiGPO, with [env]) also subtracts a baseline from each turn's return: see [credit for turns](algorithms.md#credit-for-turns)")
    discount: float = key(1.0, "γ of the returns of turns, with [env]: a reward is multiplied by γ for each turn between the reward and the turn it is credited to", "0 <= x <= 1")
    scale: Scale | None = key(None, "divisor of the difference between reward and baseline")
    mask_truncated_completions: bool = key(False, "exclude completions that reach the length limit from the loss")
    dynamic_sampling: bool | None = key(None, "replace prompts whose completions all have the same reward")
    max_resample: int = key(3, "maximum number of replacement rounds per batch step", ">= 0")
    overlong: OverlongConfig | None = None
    top_entropy_quantile: float = key(1.0, "use only this share of the tokens, those with the highest entropy, in the policy term", "0 < x <= 1")
    sync_every: int = key(1, "batch steps between refreshes of the sampler's weights; a refresh takes place at an update", ">= 1")
    ref_sync_every: int = key(0, "batch steps between updates of the reference model towards the policy; 0: never; requires `beta` > 0", ">= 0")
    ref_mixup: float = key(0.6, "α in the update of the reference model: reference ← α·policy + (1 − α)·reference", "0 < x <= 1")
    ref_quantization: QuantizationMode = key("none", 'quantize the reference model; used with `beta` > 0 and `tune = "full"`')
    ref_storage: Storage = key("packed", "like `rollout.storage`; `packed` by default, because saving memory is the only reason to quantize a reference model")


@attrs.frozen(kw_only=True)
class TeacherConfig:
    """[teacher]: a model that scores each token of the student's completions: see [a teacher](cold-start.md#a-teacher)."""

    path: str = key("", 'a model folder or Hub name with the student\'s vocabulary, quantized or not; `"self"`: the student as it is at the start of the run, with a `hint`; empty: none')
    form: Literal["reward", "loss"] = key("reward", "`reward`: the reverse KL is an advantage of each sampled token; `loss`: it is a term of each token's loss, exact over the whole vocabulary")
    weight: float = key(1.0, "coefficient of the KL", "> 0")
    task_weight: float = key(1.0, "coefficient of the advantages from the rewards; 0: learn from the teacher only", ">= 0")
    hint: str = key("", 'text with `{answer}` that is appended to the question in the teacher\'s prompt, but not in the student\'s; required with `path = "self"`')


@attrs.frozen(kw_only=True)
class OptimConfig:
    """[optim]: AdamW and the amount of training."""

    learning_rate: float = key(1e-06, "AdamW's learning rate, at the peak of the schedule", ">= 0")
    schedule: ScheduleName = key("cosine", "learning rate after the warm-up: decay to 0 over the updates, or constant")
    warmup_ratio: float = key(0.1, "share of all updates that belong to the warm-up; the learning rate is above 0 at the first update", "0 <= x <= 1")
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW's betas", "each: 0 <= x < 1")
    eps: float = key(1e-08, "AdamW's epsilon", "> 0")
    weight_decay: float = key(0.0, "decoupled weight decay, applied to every trained weight", ">= 0")
    moments: Stored = key("float32", "dtype of AdamW's two moments; bfloat16 uses stochastic rounding: [memory](memory.md#weights-in-bfloat16)")
    max_grad_norm: float = key(1.0, "clip the gradient to this global norm; 0: no clipping", ">= 0")
    batch_size: int = key(1, "prompts per batch step (not completions)", ">= 1")
    gradient_accumulation_steps: int = key(1, "batch steps per update", ">= 1")
    num_epochs: int = key(1, "passes over the training data", ">= 1")
    max_steps: int = key(0, "total number of batch steps; 0: determined by `num_epochs`", ">= 0")
    num_iterations: int = key(1, "passes over each rollout", ">= 1")
    minibatches: int = key(1, "updates per pass: each rollout is split into this many parts; at most `batch_size` × `num_generations`", ">= 1")
    max_bad_updates: int = key(10, "stop the run after this many consecutive updates with NaN or infinite values; 0: never; see [faults.md](troubleshooting.md)", ">= 0")


@attrs.frozen(kw_only=True)
class SftConfig:
    """[sft]: supervised updates on reference completions, before GRPO or without it: see [supervised updates](cold-start.md#supervised-updates)."""

    updates: int = key(0, "supervised updates before GRPO; 0: determined by `epochs`", ">= 0")
    epochs: int = key(0, "passes over the reference completions before GRPO; 0 with `updates` = 0: none", ">= 0")
    only: bool = key(False, "stop after the supervised updates, as `grpo sft` does; the default is then one epoch")
    completions: str = key("", "a run's folder, or a file in the format of its `completions.jsonl`; its prompts and completions replace `data.completion`; empty: none")
    min_reward: float = key(1.0, "use only those `completions` with at least this reward")
    learning_rate: float = key(1e-05, "AdamW's learning rate for these updates, at the peak of `optim.schedule`; GRPO restarts the schedule", ">= 0")
    batch_size: int = key(0, "reference completions per batch step; 0: the number that GRPO samples, `optim.batch_size` × `rollout.num_generations`", ">= 0")

    @property
    def is_on(self) -> bool:
        """Whether there are supervised updates."""
        return self.only or self.updates + self.epochs > 0


@attrs.frozen(kw_only=True)
class EnvConfig:
    """[env]: the tools, environment or program that replies to the model's turns. Without any of them, completions have one turn."""

    factory: str = key("", "a class with `reset`, `package.module:Class` or `path/to/file.py:Class`, whose public methods are the tools; empty: none")
    tools: tuple[str, ...] = key((), "functions to use as tools, `package.module:function` or `path/to/file.py:function`; only a file name: all of its public functions", "no empty string")
    program: tuple[str, ...] = key((), 'a command that runs one episode, such as `["python", "agent.py"]`: it calls the model at `OPENAI_BASE_URL`, and prints its reward; see [agents](agents.md)', "no empty string")
    taskset: str = key("", 'a taskset of the library verifiers, `"verifiers:ID"`: its tasks are the data, its harness runs the episodes, and its rewards score them; see [agents](agents.md)')
    max_turns: int = key(8, "maximum number of model turns in a conversation; tool calls in the last one are not executed. For a program: maximum number of its calls", ">= 1")
    max_tool_calls: int = key(0, "maximum number of tool calls in a conversation; any further call returns an error; 0: no limit", ">= 0")
    max_observation_tokens: int = key(512, "a tool's result is truncated to this many tokens", ">= 1")
    timeout: float = key(30.0, "time limit for all calls of a turn, or for a `reset`, in seconds; for a program: between two of its calls; 0: no limit", LONG)
    workers: int = key(32, "maximum number of concurrent calls (each in a thread) or programs; coroutines are not limited", ">= 1")
    on_error: Literal["observation", "no_reward"] = key("observation", "if a call fails or times out: show the model the error, or end the conversation without a reward")
    schedule: Literal["together", "arrival"] = key("together", "when conversations continue. `together`: once no completion is still decoding, so that results are reproducible; `arrival`: each as soon as its reply arrives")

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

    every: int = key(0, "updates between evaluations; 0: only at the start and the end", ">= 0")
    samples: int = key(200, "number of problems, the same ones each time; 0: all", ">= 0")
    max_new_tokens: int = key(0, "maximum length of a completion; 0: the same as in the rollout", ">= 0")
    at_start: bool = key(True, "evaluate before the first step")


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """[checkpoint]: how often checkpoints are written, and how many are kept."""

    every: int = key(100, "batch steps between checkpoints; 0: only `final/`", ">= 0")
    keep_last: int = key(3, "number of most recent checkpoints to keep; 0: all, regardless of `keep_best`", ">= 0")
    keep_best: int = key(1, "number of best checkpoints to keep in addition, ranked by exact match, then by the reward on held-out problems, then by reward; 0: none, and no `best/`", ">= 0")
    on_error: Literal["continue", "stop"] = key("continue", "if a checkpoint or log entry cannot be written: continue training and retry, or stop")


@attrs.frozen(kw_only=True)
class LogConfig:
    """[log]: which logs are written, and to which dashboards."""

    every: int = key(1, "updates between log entries; the last update is always logged", ">= 1")
    jsonl: bool = key(True, "write [`training_log.jsonl`](report.md#the-files)")
    completions: bool = key(True, "write [`completions.jsonl`](rewards.md#completionsjsonl), with prompt, text, rewards, advantage and length of every completion, and [`evaluations.jsonl`](report.md#evaluationsjsonl)")
    report: bool = key(True, "write [`report.html`](report.md) to the run's folder when the run ends")
    tensorboard: bool = key(False, "also log to TensorBoard (requires `tensorboardX`)")
    wandb: bool = key(False, "also log to Weights & Biases (requires `wandb`)")
    project: str = key("grpo_fn", "W&B project", "one line, not empty")
    entity: str = key("", "W&B user or team; empty: the account's default")
    run_name: str = key("", "the run's name in W&B; empty: `run.name`")


@attrs.frozen(kw_only=True)
class WatchConfig:
    """[watch]: when to warn that training goes wrong."""

    patience: int = key(10, "warn after this many consecutive updates in which rewards are equal within every group, or one of the two limits below is crossed; 0: no warnings, not even if a run has [become worse](troubleshooting.md)", ">= 0")
    min_entropy: float = key(0.001, "warn if the entropy is below this, in nats per token: completions hardly differ; 0: off", ">= 0")
    max_kl: float = key(10.0, "warn if the KL is above this, in nats per token: the policy is far from the reference model; 0: off", ">= 0")


@attrs.frozen(kw_only=True)
class StopConfig:
    """[stop]: conditions that end a run before its last step."""

    when: tuple[str, ...] = key((), 'conditions such as `"em >= 0.95"` or `"kl > 0.5 for 20"` (20 consecutive readings); the first that is met ends the run', "no empty string")
    patience: int = key(0, "end a run that has [become worse](troubleshooting.md) and has not recovered for this many updates; 0: never", ">= 0")


@attrs.frozen(kw_only=True)
class RanksConfig:
    """[ranks]: what the processes of `mlx.launch` do: see [many devices](many-devices.md)."""

    samplers: int = key(0, "number of ranks that only sample, all but rank 0, which only learns; requires `rollout.max_staleness` >= 1. 0: each rank samples and learns. See [samplers apart](many-devices.md#samplers-apart)", ">= 0")


@attrs.frozen(kw_only=True)
class SystemConfig:
    """[system]: memory and speed on this machine."""

    compile: bool = key(True, "compile the learner's steps; `false` makes debugging easier; on CUDA, operations are not fused")
    grad_checkpoint: bool = key(False, "recompute each block in the backward pass: needs less memory, takes more time")
    memory_limit_gb: float = key(0.0, "MLX's memory limit, in 10⁹ bytes; 0: MLX's default", LONG)
    swap_limit_gb: float = key(0.0, "save and stop the run once the system has swapped out this much more than at its start, in 10⁹ bytes. 0: on a Mac half of its memory, and at most half of the free disk; elsewhere no limit. See [Mac](memory.md#on-a-mac)", LONG)
    micro_batch_tokens: int = key(0, "tokens per micro-batch of the learner; affects memory and speed, not the update. 0: automatic. CPU: sized for 75 MB of activations, but at least a prompt with three completions and 256 tokens; Metal: 8,192, less while an evaluation takes over 2 s; CUDA: 16,384 to 65,536, more for smaller models, while the gradient needs less than half of the memory; if they do not fit, halved until the gradient needs at most 85 %", ">= 0")
    share_prompts: Literal["auto", "always", "never"] = key("auto", "compute a group's prompt once in the learner, not once per completion; auto: on a CPU, if the model supports it (plain key-value caches, no `grad_checkpoint`); `always` is an error if it is not supported")
    collective_timeout: float = key(600.0, "seconds that ranks wait for each other before the run stops with a message naming the missing ranks; see [many devices](many-devices.md)", "0 < x <= 1e9")
    check_model: bool = key(True, "before the first rollout, check on a few tokens of the run's prompts that the sampler and the learner compute the same: [models](models.md#what-a-run-checks)")
    disable: tuple[str, ...] = key((), 'speed or memory mechanisms to turn off, such as `["shared_prefix", "merged_adapters"]`, to measure a mechanism\'s gain or rule it out as a cause; results are the same up to rounding. [architecture](architecture.md#speed-and-memory) lists the names', "none twice")
