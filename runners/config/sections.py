"""The config's keys: each class is a table of the TOML file, each line a key with its default, its meaning in
Markdown, and its range. docs/config.md and `grpo-run --explain` are made from them."""

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
"""What grpo_fn.LossSpec and its presets say of themselves: loading a config must not import MLX. `python
docs/manual/written.py` writes the file, and a test holds that it is current."""
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
    """[run]: where a run's files are: `output_dir/name`."""

    name: str = key("grpo", "the run's folder is `output_dir/name`", "a relative folder name, no `..`")
    output_dir: str = key("outputs", "the folder of all runs", "one line, not empty")
    seed: int = key(0, "the order of the prompts, sampling and the adapters' first values depend on it; no two seeds share random numbers", "0 <= x <= 9223372036854775807")
    overwrite: bool = key(False, "replace a finished run in the same folder: its checkpoints and model are removed, its logs stay as `*.previous.jsonl`. Only `--overwrite` on the command line replaces an interrupted run")


@attrs.frozen(kw_only=True)
class LoraConfig:
    """[model] lora: mlx-lm's adapters, used with tune = "lora" or "dora"."""

    rank: int = key(8, "rank of the adapters", ">= 1")
    scale: float = key(20.0, "the adapters' output is multiplied by it (mlx-lm's `scale`)", "> 0")
    layers: int = key(-1, "how many blocks get adapters, counted from the last; -1: all", "-1 or >= 1")
    keys: tuple[str, ...] = key((), "names of the layers to adapt, such as `\"self_attn.q_proj\"`; empty: mlx-lm's choice", "no empty string")


@attrs.frozen(kw_only=True)
class ModelConfig:
    """[model]: what is trained, and in which precision."""

    path: str = key(attrs.NOTHING, "`\"embedded\"` or `\"embedded-tools\"` (the small models in the package), an mlx-lm model folder ([nanochat](nanochat.md)'s as well), or a Hub name", "one line, not empty")
    tune: Literal["full", "lora", "dora"] = key("full", "what is trained: all weights, or adapters")
    lora: LoraConfig = attrs.field(factory=LoraConfig)
    adapters: str = key("", 'a folder of adapters in mlx-lm\'s or PEFT\'s format to go on from, such as another run\'s `final`; their rank, scale, layers and keys replace `lora`, and `loss.beta` holds the model to them. With `tune = "lora"` or `"dora"`, as they are; empty: new ones')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key("auto", "dtype of the computation; auto: float32 on a CPU, else the model's own. On a CPU experts are multiplied in float32 in any case")
    master: Stored = key("float32", "dtype of the weights that the optimizer changes; bfloat16 is rounded stochastically: [when to choose it](memory.md#weights-in-bfloat16)")
    trust_remote_code: bool = key(False, "run Python code that comes with a model")
    loader: str = key("", "your function that opens the folder, `package.module:function` or `path/to/file.py:function`: see [own model](own-model.md); empty: mlx-lm")


@attrs.frozen(kw_only=True)
class DataConfig:
    """[data]: questions, answers and the prompt around a question."""

    source: str = key("openai/gsm8k", '`"embedded"` or `"embedded-tools"`, a file or folder (.jsonl, .json, .csv, .parquet), a Hub name, or `"reasoning-gym:TASK"` ([tasks](tasks.md#reasoning-gym)); a path that exists comes first', "one line, not empty")
    name: str = key("", "configuration of a Hub data set; empty means `main` for `openai/gsm8k`. Of a reasoning-gym task: a JSON object of its settings")
    split: str = key("train", "the training data; in a folder: the file of that name, or its shards", "one line, not empty")
    eval_split: str = key("test", "the evaluation data; if it is the same as `split`, or the source is a single file, the last tenth of the rows (1 to 1,000) is held out", "one line, not empty")
    question: str = key("question", "the column that holds the question", "one line, not empty")
    answer: str = key("answer", "the column that holds the answer: the part after its last `####`, or all of it if there is none; empty, or no such column: the data has none, and your own [rewards](rewards.md#your-own) or an [environment](turns.md#an-environment) measure")
    completion: str = key("", "the column that holds the gold completion, for [supervised updates](sft.md): a text, or a list of messages whose last turn is the assistant's (if it is that of `prompt` too, the prompt is what precedes); empty: all of `answer`")
    prompt: str = key("", "the column that holds a whole prompt, a list of messages (or a text), in place of `question`: see [turns](turns.md#messages); empty: none")
    image: str = key("", "the column of images, paths beside the data or bytes, for vision-language models: see [images](vision.md); empty: none")
    image_folder: str = key("", "the folder of the images' paths, which must stay inside it; empty: that of the data")
    image_max_pixels: int = key(0, "larger images are scaled down to so many pixels; 0: to what the model's processor allows", ">= 0")
    system_prompt: str = key(FORMS["xml"].instruction, "the system message; empty: none. If not set, it is the one that asks for `answer.form` (shown: that of `xml`), and none with `data.prompt`")
    nudge: str = key("<reasoning>", "the first words of every completion, written into the prompt; rewards and evaluation see them too. If not set, it is that of `answer.form`, and none with `data.prompt`")
    thoughts: tuple[str, ...] = key(TAGS, "the tags around a model's thoughts. No answer, format or tool call is read inside them; a completion that is cut off there has no answer. `[]`: completions are read as a whole: see [thoughts](your-task.md#thoughts)", "an opening and a closing tag, or nothing")
    chat_template_kwargs: dict[str, bool | int | float | str] = key({}, "further arguments of the chat template, such as `{enable_thinking = false}`", "what the template itself reads", hash=False)
    chat_template: str = key("", "a file with the chat template to use, in jinja as transformers writes it; the run's models are saved with it. Empty: the model's own")
    prompt_form: Literal["chat", "raw"] = key("chat", "`raw`: a prompt is a text that the model continues, without template, roles and system prompt, for [base models](base-models.md)")
    max_samples: int = key(0, "how many rows to train on, from the first; 0: all", ">= 0")
    max_prompt_length: int = key(512, "longer prompts (tokens) are left out and counted", ">= 1")
    on_bad_row: Literal["raise", "skip"] = key("raise", "a row without a question or an answer ends the run, or is left out and counted")
    curriculum: Literal["none", "static", "adaptive"] = key("none", "which prompts are drawn: all in mixed order; those of `data.difficulty` with a middling pass rate, from easy to hard; or by pass rates that the run estimates as it goes: see [curriculum](curriculum.md)")
    difficulty: str = key("", "the pass rates that `grpo difficulty` has measured, a file; needed for `static`, and what `adaptive` begins with; empty: none")
    pass_rates: tuple[float, float] = key((0.05, 0.95), "with `static`: prompts with a measured rate outside of these bounds, or with none, are left out and counted", "0 <= low < high")
    target_rate: float = key(0.5, "with `adaptive`: prompts whose pass rate is near this are drawn most", "0 < x < 1")
    rate_decay: float = key(0.98, "with `adaptive`: what is known of a prompt counts by this factor less after every batch step", "0 < x < 1")
    explore: float = key(0.2, "with `adaptive`: share of the draws that go through all prompts in turn, whatever their pass rates", "0 <= x <= 1")
    pass_reward: float = key(1.0, "a completion passes with a combined reward of at least this; with `correctness_reward_func` among the rewards, if its answer is right")
    transform: str = key("", "your function from a row to a row, named in the same way: see [own data](own-data.md); empty: none")


@attrs.frozen(kw_only=True)
class AnswerConfig:
    """[answer]: how the answer is read from a completion, and when it is right: see [your task](your-task.md)."""

    form: str = key("xml", "where a completion has its answer: `xml` (in `<answer>` tags), `last_number`, `boxed` (`\\boxed{}`), `gsm8k` (behind `####`), `letter`, `json:FIELD`, `exact` (the whole text), `code` (a Python program: the answer column has its [tests](your-task.md#code-with-tests)), `regex:PATTERN` (its group), `file.py:function` (from a text to its answer or None); `none`: nowhere. If not set, it is `none` where all rewards are your own, or the data has no answers", "one line, not empty")
    ignore_case: bool = key(False, "capital and small letters are the same; with `exact` a full stop at the end does not count either")
    ignore_spaces: bool = key(False, "blanks and line ends do not count")
    partial_sandbox: bool = key(False, "run programs of `form = \"code\"` also where this machine lacks a part of their [sandbox](your-task.md#code-with-tests); `grpo doctor` names what it lacks")


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """[rollout]: how completions are drawn."""

    num_generations: int = key(8, "completions per prompt, G", ">= 2")
    first_stage: int = key(0, "draw so many completions of each prompt first, and the rest of the group only where their rewards differ; 0: all at once. Each completion is the same as without: see [curriculum](curriculum.md#two-stages)", "0 or >= 2")
    max_new_tokens: int = key(512, "length limit of a completion, tokens; L_max of the aggregation `constant`", ">= 1")
    temperature: float = key(1.0, "divides the sampler's logits and the learner's alike", "> 0")
    top_p: float = key(1.0, "second, keep the smallest set of tokens with this probability of what `top_k` left; 1: all", "0 < x <= 1")
    top_k: int = key(0, "first, keep this many tokens; 0: all. The learner's log-probs are of the whole distribution: see [algorithms](algorithms.md#around-the-loss)", ">= 0")
    min_p: float = key(0.0, "third, keep tokens with at least this share of the largest probability; 0: all", "0 <= x < 1")
    stop: tuple[str, ...] = key((), "a completion ends at the token that completes one of these", "no empty string")
    quantization: QuantizationMode = key("none", "few-bit weights for the sampler; the learner keeps its own: see [quantization.md](quantization.md)")
    storage: Storage = key("dequantized", "rounded weights at full speed, or packed ones that take less memory; used with `quantization`")
    group_size: int = key(0, "weights that share a scale, in affine modes, of sampler and reference; 0: 64", "0 or 32 or 64 or 128")
    quantize_head: bool = key(False, "round embeddings and head too, of sampler and reference")
    calibration: Literal["none", "activations"] = key("activations", "affine formats of at most 6 bits, of sampler and reference, are rounded with the moments of their layers' inputs in the first rollout, which is drawn in full precision; `none`: to nearest")
    bits_budget: float = key(0.0, "with `calibration`: average bits of a sampler's weight, scales included; affine formats of 3 to 8 bits go where rounding changes log-probs most, as the first rollout shows; 0: all have `quantization`", "0 or 3.5 <= x <= 9")
    mismatch_limit: float = key(0.2, "a quantized sampler gets a finer format, and at last full precision, if its KL divergence from the learner is larger (nats a token), or less than half of the sample counts; 0: never", ">= 0")
    launch: Literal["auto", "eval", "async"] = key("auto", "wait for each decoding step (`eval`), or prepare the next step meanwhile (`async`, which copies the KV cache); auto: `eval` on a CPU, `async` on a GPU")
    check_every: int = key(8, "decoding steps between two checks which completions have ended", ">= 1")
    max_batch: int = key(0, "the largest number of rows decoded together, in whole groups; 0: as many as memory holds", ">= 0")

    def group_size_of(self, quantization: str) -> int:
        """The group size for a format: `group_size` where the format leaves the choice, else 0, the format's own."""
        return self.group_size if quantization.startswith("affine") else 0


@attrs.frozen(kw_only=True)
class RewardConfig:
    """[reward]: functions (a name, package.module:function, file.py:function), their weights."""

    functions: tuple[str, ...] = key(REWARD_NAMES, 'those of `answer.form` if not set: all five with `xml`, else the first; a built-in name, `package.module:function` or `path/to/file.py:function`; see [rewards.md](rewards.md). `[]` only with an `env.factory` that has `get_reward`', "none twice")
    weights: tuple[float, ...] = key((), "weight of each function, not all 0; empty: 1.0 each")
    aggregate: Aggregate = key("sum_then_normalize", "add the rewards, then take advantages; or normalise each reward in its group first (GDPO)")
    timeout: float = key(60.0, "seconds that a call of one reward may take; 0: no limit, in the run's own process", LONG)
    on_error: Literal["skip", "raise"] = key("skip", "a reward that fails is left out and reported, or ends the run")
    stop_if_all_fail: bool = key(True, 'with `on_error = "skip"`: a reward that fails for every completion of a batch step ends the run; see [faults.md](faults.md#rewards)')


@attrs.frozen(kw_only=True)
class OverlongConfig:
    """[loss] overlong: DAPO's penalty on completions that come close to the length limit."""

    buffer: int = key(0, "tokens before the limit where the length penalty begins; 0: no penalty; without a table `overlong`: the preset's", ">= 0")
    penalty: float = key(1.0, "the length penalty at the limit", ">= 0")


@attrs.frozen(kw_only=True)
class LossConfig(_LossKeys):
    """[loss]: a preset, what differs from it, and the steps around the loss. None: the preset's value, which `Config.check` fills in."""

    router_aux_coef: float = key(0.0, "of models with experts: the coefficient of the loss that keeps their load even: [models](models.md#experts)", ">= 0")
    router_replay: bool = key(False, "of models with experts: the learner uses the experts that the sampler chose: [models](models.md#router-replay)")
    baseline: Baseline | None = key(None, "what is subtracted from a reward; `turn` (GiGPO, with [env]): also what is subtracted from a turn's return: see [credit for turns](algorithms.md#credit-for-turns)")
    discount: float = key(1.0, "γ of the returns of turns, with [env]: a later reward counts γ less for each turn between", "0 <= x <= 1")
    scale: Scale | None = key(None, "what the difference is divided by")
    mask_truncated_completions: bool = key(False, "completions that reach the length limit do not count")
    dynamic_sampling: bool | None = key(None, "replace prompts whose completions all get one reward")
    max_resample: int = key(3, "rounds of replacement per batch step", ">= 0")
    overlong: OverlongConfig | None = None
    top_entropy_quantile: float = key(1.0, "only this share of the tokens, those with the largest entropy, is in the policy term", "0 < x <= 1")
    sync_every: int = key(1, "batch steps between two refreshes of the sampler's weights, at an update", ">= 1")
    ref_sync_every: int = key(0, "batch steps between two moves of the reference towards the policy; 0: never; only with `beta` > 0", ">= 0")
    ref_mixup: float = key(0.6, "how far the reference moves: α·policy + (1 − α)·reference", "0 < x <= 1")
    ref_quantization: QuantizationMode = key("none", 'few-bit weights for the reference, with `beta` > 0 and `tune = "full"`')
    ref_storage: Storage = key("packed", "as `rollout.storage`; `packed`, because memory is the only reason to round a reference")


@attrs.frozen(kw_only=True)
class TeacherConfig:
    """[teacher]: a model whose distribution the student approaches on its own completions: see [a teacher](teacher.md)."""

    path: str = key("", "a model folder or Hub name with the student's vocabulary, quantized or not; `\"self\"`: the student as it is at the start of the run, with a `hint`; empty: none")
    form: Literal["reward", "loss"] = key("reward", "the reverse KL as an advantage of each sampled token, or exactly, over the whole vocabulary, as a term of each token's loss")
    weight: float = key(1.0, "the KL's coefficient", "> 0")
    task_weight: float = key(1.0, "coefficient of the advantages from the rewards; 0: the teacher alone", ">= 0")
    hint: str = key("", "a text with `{answer}` that is appended to the question in the teacher's prompt, not in the student's; required with `path = \"self\"`")


@attrs.frozen(kw_only=True)
class OptimConfig:
    """[optim]: AdamW and the amount of training."""

    learning_rate: float = key(1e-06, "AdamW's, the largest of the schedule", ">= 0")
    schedule: ScheduleName = key("cosine", "after the warm-up: down to 0 over the updates, or flat")
    warmup_ratio: float = key(0.1, "share of all updates during which the rate rises; it is not 0 at the first one", "0 <= x <= 1")
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW's", "each: 0 <= x < 1")
    eps: float = key(1e-08, "AdamW's", "> 0")
    weight_decay: float = key(0.0, "decoupled, on every trained weight", ">= 0")
    moments: Stored = key("float32", "dtype in which AdamW's two averages are kept; bfloat16 is rounded stochastically: [memory](memory.md#weights-in-bfloat16)")
    max_grad_norm: float = key(1.0, "bound on the gradient's global norm; 0: none", ">= 0")
    batch_size: int = key(1, "prompts per batch step (not completions)", ">= 1")
    gradient_accumulation_steps: int = key(1, "batch steps per update", ">= 1")
    num_epochs: int = key(1, "passes over the training data", ">= 1")
    max_steps: int = key(0, "batch steps in all; 0: as many as the epochs take", ">= 0")
    num_iterations: int = key(1, "passes over one rollout", ">= 1")
    minibatches: int = key(1, "updates per pass: the rollout is cut into this many parts; at most `batch_size` × `num_generations`", ">= 1")
    max_bad_updates: int = key(10, "the run ends after this many updates in a row with numbers that are not finite; 0: never; see [faults.md](faults.md)", ">= 0")


@attrs.frozen(kw_only=True)
class SftConfig:
    """[sft]: supervised updates on gold completions, before GRPO's or alone: see [supervised updates](sft.md)."""

    updates: int = key(0, "supervised updates before GRPO; 0: as many as `epochs` takes", ">= 0")
    epochs: int = key(0, "passes over the gold completions before GRPO; 0 with `updates` = 0: none", ">= 0")
    only: bool = key(False, "end after the supervised updates, as `grpo sft` does; by default one epoch")
    completions: str = key("", "a run's folder or a file like its `completions.jsonl`, whose prompts and completions are used in place of `data.completion`; empty: none")
    min_reward: float = key(1.0, "of `completions`, only those with at least this reward are used")
    learning_rate: float = key(1e-05, "AdamW's for these updates, the largest of `optim.schedule`, which GRPO begins again", ">= 0")
    batch_size: int = key(0, "gold completions per batch step; 0: as many as GRPO samples, `optim.batch_size` × `rollout.num_generations`", ">= 0")

    @property
    def is_on(self) -> bool:
        """Whether there are supervised updates."""
        return self.only or self.updates + self.epochs > 0


@attrs.frozen(kw_only=True)
class EnvConfig:
    """[env]: what answers the model's turns; without factory and tools completions have one turn."""

    factory: str = key("", "a class with `reset`, `package.module:Class` or `path/to/file.py:Class`, whose public methods are tools; empty: none")
    tools: tuple[str, ...] = key((), "plain functions as tools, named in the same way; a file alone: all of its public functions", "no empty string")
    max_turns: int = key(8, "turns of the model in a conversation; calls of the last one are not made", ">= 1")
    max_tool_calls: int = key(0, "calls in a conversation; further ones get an error as their result; 0: any number", ">= 0")
    max_observation_tokens: int = key(512, "a call's result is cut off after this many tokens", ">= 1")
    timeout: float = key(30.0, "seconds that the calls of a turn, or a `reset`, may take; 0: no limit", LONG)
    workers: int = key(32, "calls that run at a time, each in a thread; coroutines do not count", ">= 1")
    on_error: Literal["observation", "no_reward"] = key("observation", "a call that fails or is late: the model sees the error, or the conversation ends without a reward")
    schedule: Literal["together", "arrival"] = key("together", "when turns continue: all together when no row decodes, with the same numbers each time; or each as soon as its reply is there")

    @property
    def answers(self) -> bool:
        """Whether anything answers the model's turns."""
        return bool(self.factory or self.tools)


@attrs.frozen(kw_only=True)
class EvalConfig:
    """[eval]: greedy exact match on data.eval_split."""

    every: int = key(0, "updates between two evaluations; 0: only at the start and the end", ">= 0")
    samples: int = key(200, "problems, always the same ones; 0: all", ">= 0")
    max_new_tokens: int = key(0, "length limit; 0: the rollout's", ">= 0")
    at_start: bool = key(True, "evaluate before the first step")


@attrs.frozen(kw_only=True)
class CheckpointConfig:
    """[checkpoint]: how often, and how many stay."""

    every: int = key(100, "batch steps between two checkpoints; 0: only `final/`", ">= 0")
    keep_last: int = key(3, "how many of the newest stay; 0: all, whatever `keep_best` says", ">= 0")
    keep_best: int = key(1, "how many of the best stay besides: by exact match, then by the reward on held-out problems, then by reward", ">= 0")
    on_error: Literal["continue", "stop"] = key("continue", "if a checkpoint or a line of a log cannot be written: train on and try again, or stop")


@attrs.frozen(kw_only=True)
class LogConfig:
    """[log]: which logs are written, and which dashboards get them."""

    every: int = key(1, "updates between two lines; the last update always has one", ">= 1")
    jsonl: bool = key(True, "write [`training_log.jsonl`](report.md#the-files)")
    completions: bool = key(True, "write [`completions.jsonl`](rewards.md#completionsjsonl): prompt, text, rewards, advantage and length of every completion; and [`evaluations.jsonl`](report.md#evaluationsjsonl)")
    report: bool = key(True, "write [`report.html`](report.md) into the run's folder when the run ends")
    tensorboard: bool = key(False, "also to TensorBoard (needs `tensorboardX`)")
    wandb: bool = key(False, "also to Weights & Biases (needs `wandb`)")
    project: str = key("grpo_fn", "the project in W&B", "one line, not empty")
    entity: str = key("", "the user or team in W&B; empty: the account's own")
    run_name: str = key("", "the run's name in W&B; empty: `run.name`")


@attrs.frozen(kw_only=True)
class WatchConfig:
    """[watch]: when a line warns that training goes wrong."""

    patience: int = key(10, "updates in a row before a warning: of rewards that are equal within every group, and of the two below; 0: no warnings", ">= 0")
    min_entropy: float = key(0.001, "warn below this entropy, nats a token: completions hardly differ; 0: off", ">= 0")
    max_kl: float = key(10.0, "warn above this KL, nats a token: the policy is far from its reference; 0: off", ">= 0")


@attrs.frozen(kw_only=True)
class StopConfig:
    """[stop]: conditions that end a run before its last step."""

    when: tuple[str, ...] = key((), 'conditions; the first one that is met ends the run, such as `"em >= 0.95"` or `"kl > 0.5 for 20"` (20 readings in a row)', "no empty string")


@attrs.frozen(kw_only=True)
class SystemConfig:
    """[system]: how the machine is used."""

    compile: bool = key(True, "compile the learner's steps; false helps a debugger; on CUDA nothing is fused in them")
    grad_checkpoint: bool = key(False, "recompute each block in the backward pass: less memory, more time")
    memory_limit_gb: float = key(0.0, "MLX's memory limit, 10⁹ bytes; 0: MLX's own", LONG)
    swap_limit_gb: float = key(0.0, "save, and end the run, once the system has swapped out so much more than at its start, 10⁹ bytes; 0: never. A Mac that swaps becomes unusable: see [metal](metal.md)", LONG)
    micro_batch_tokens: int = key(0, "tokens that the learner computes at a time; changes memory and speed, not the update. 0: automatic. CPU: sized for 75 MB of activations, but at least a prompt with three completions and 256 tokens; Metal: 8,192, less while an evaluation takes over 2 s; CUDA: 8,192 to 65,536, more for smaller models, while the gradient fills less than half of the memory; where 8,192 do not fit, halved until the gradient fills at most 85 %", ">= 0")
    share_prompts: Literal["auto", "always", "never"] = key("auto", "compute the prompt of a group once in the learner, not once per completion; auto: on a CPU, where the model allows it (plain key-value caches, no `grad_checkpoint`); `always` is refused if it is impossible")
    collective_timeout: float = key(600.0, "seconds that ranks wait for each other before the run ends with a line that names who is missing; see [many devices](many-devices.md)", "0 < x <= 1e9")
    check_model: bool = key(True, "before the first rollout, compare what the model decodes with what it is trained on, on a few tokens of the run's prompts: [models](models.md#what-a-run-checks)")
    disable: tuple[str, ...] = key((), 'mechanisms for speed or memory to turn off, such as `["shared_prefix", "merged_adapters"]`: to find out what one brings, or whether one is at fault; results are the same to rounding. [architecture](architecture.md#speed-and-memory) has the names', "none twice")
