"""The settings of one run as frozen dataclasses, and the only way into them: a checked conversion from ml_collections.

The library's defaults live here: the authors' choices where they state one, else the plainest value. The files in
`configs/` say what differs. Nothing here knows a device, a model file or a task: what depends on those is checked where
they are opened.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ml_collections import config_dict

from envace_jax import config_checks

ASSETS = Path(__file__).resolve().parent / "assets"
ASSET_PREFIX = "asset:"
Dtype = Literal["float32", "bfloat16"]


class UserError(ValueError):
    """Bad input. Its text is complete lines for the person who started the run; `main` shows no traceback."""


class ConfigError(UserError):
    """A setting that is unknown, of the wrong type, or cannot work together with another one."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    path: str = ""  # a folder in Hugging Face layout, a hub id, or "asset:NAME" for one shipped in the package
    compute_dtype: Dtype = "bfloat16"  # of activations; softmax, norms, RoPE and logits are float32 always
    param_dtype: Dtype = "float32"  # of parameters and optimizer state; with LoRA of the base, adapters are float32
    # Of matrices that are not trained (LoRA's base, a frozen player): 8-bit integers, a scale for each output.
    quantize: Literal["none", "int8"] = "none"
    # What a layer's backward pass recomputes; "dots" is attention only, "offload" keeps the layers' inputs on the host.
    remat: Literal["none", "dots", "full", "offload"] = "full"
    # The platform's kernel ("auto": where there is one, on TPU and GPU), or plain XLA; see models/kernels.py.
    attention: Literal["auto", "plain", "kernel"] = "auto"
    unroll: bool | None = None  # layers as a loop in Python instead of a scan; None lets the model's size decide


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, which are trained in place of the model's own parameters (docs/lora.md)."""

    rank: int = 0  # 0 trains all parameters
    alpha: float = 16.0  # an adapter's product is multiplied by alpha / rank
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    path: str = ""  # adapters to start from: a folder or hub id with PEFT's files, of this rank, alpha and targets


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class DataConfig:
    # "tiny" for the generated world, or tasks: a file, folder, pattern or hub id (data.py); or a benchmark's, such as
    # bfcl:multi_turn_base or tau2:airline (docs/environments.md).
    source: str = ""
    checklist: int = 0  # which of a record's checklists scores it
    bad_records: Literal["stop", "skip"] = "stop"  # a few may be left out, with their reasons
    # Tokens of system text, tools and first user turn: longer tasks are left out, as are those that the limits cannot
    # hold in any case. 0 leaves it to the limits.
    longest_prompt: int = 0
    environments: tuple[str, ...] = ()  # files of environments of one's own, which tasks call by the file's name
    split: Literal["train", "heldout"] = "train"  # of the tiny world
    count: int = 0  # tasks to use; 0 takes every task of a file (the tiny world needs a number)
    seed: int = 0  # of the generated tasks and of the order in which tasks are drawn
    tasks_per_step: int = 16
    attempts: int = 4  # trajectories per task: the size of a GRPO group
    sampling: Literal["uniform", "success"] = "uniform"  # "success": tasks solved about half the time more often
    # Train only on groups whose attempts were not all rewarded alike, and attempt further tasks in place of the others,
    # in at most so many further rollouts of a step. (batch.drop_zero_advantage saves work and changes no update.)
    filter_zero_variance: bool = False
    extra_rollouts: int = 2


@dataclasses.dataclass(frozen=True)
class PromptConfig:
    style: Literal["full", "compact"] = "full"  # see roles.py
    thinking: bool = True
    reference_examples: bool = True  # show the task's reference calls and results to the rehearsing role
    max_act_prompt: int = 12000  # tokens
    max_rehearse_prompt: int = 12000  # tokens; the conversation part is cut from the left to fit


@dataclasses.dataclass(frozen=True)
class LimitsConfig:
    assistant_turns: int = 30
    user_turns: int = 30
    parallel_calls: int = 20  # tool calls in one assistant message
    generations: int = 200  # segments of both roles in one trajectory
    act_context: int = 20000  # tokens of the whole act stream, the next response's budget included
    act_response: int = 8000  # tokens
    rehearse_response: int = 8000  # tokens


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    slots: int = 64  # sequences decoded side by side
    cache_rows: int = 0  # streams whose caches are kept (a trajectory has two), those in slots too; 0: twice the slots
    max_length: int = 20000  # tokens a stream's cache can hold
    decode_chunk: int = 16  # the most tokens decoded between two looks at what has finished
    refill_share: float = 0.125  # of the decoding slots: so many finished also end a chunk, to be refilled
    temperature: float = 1.0
    top_p: float = 1.0
    prefill_lengths: tuple[int, ...] = (128, 512, 2048)  # padded shapes, see buckets.py
    prefill_rows: tuple[int, ...] = (1, 4)
    cache_lengths: tuple[int, ...] = (4096, 8192, 20000)
    cache_dtype: Dtype = "bfloat16"
    # Pages of the cache in all; streams take them as they grow and share those that agree. 0: whole rows instead, which
    # a CPU reads faster. With pages the cache has no lengths.
    pages: int = 0
    page_size: int = 64  # positions of a page


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    # Who answers tool calls: the policy, the environment, or another model (then only its acting is trained).
    responder: Literal["rehearsed", "real", "external"] = "rehearsed"
    # Whose parameters play the two roles where both are the policy's, see docs/studies.md. A frozen role is played for
    # ever by `frozen_checkpoint`, a folder or hub id; "" is model.path.
    players: Literal["shared", "separate", "frozen_act", "frozen_rehearse"] = "shared"
    frozen_checkpoint: str = ""
    schema_check: bool = False  # calls that do not fit their tool's schema end the trajectory; nobody is asked


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
    """A model behind OpenAI-compatible addresses: where it is, how patiently it is asked, and how it samples."""

    urls: tuple[str, ...] = ()  # base addresses, such as http://host:8000/v1
    model: str = ""  # its name there
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that holds the key, where one is needed
    concurrency: int = 32  # questions under way at once
    timeout_s: float = 120.0
    retries: int = 7  # tries after the first, with growing waits; then the trajectory is masked
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 8000  # of an answer, its thoughts included


@dataclasses.dataclass(frozen=True)
class ExternalConfig(EndpointConfig):
    """The model that answers tool calls where rollout.responder is external, by the policy's REHEARSE prompts."""

    checkpoint: str = ""  # one in this process, never trained: a folder or hub id with the policy's tokenizer
    cache: bool = False  # in WORKDIR/external.jsonl: the same call in the same state is asked once


@dataclasses.dataclass(frozen=True)
class RewardConfig(EndpointConfig):
    """What scores user turns; the addresses are a judge's."""

    kind: Literal["checklist", "judge"] = "checklist"  # program checks alone; or a judge for the items without one
    # A judge in this process instead of one behind addresses: a folder or hub id, or "policy", the trained one itself.
    checkpoint: str = ""
    temperature: float = 0.6
    top_p: float = 0.8
    max_tokens: int = 4096
    keep_verdicts: bool = True  # in WORKDIR/verdicts.jsonl: what was asked once is not asked again
    most_masked: float = 0.5  # share of a step's trajectories; more of them masked end the run, with the reason


@dataclasses.dataclass(frozen=True)
class UserConfig(EndpointConfig):
    """The model that plays the user in tasks with a simulated user; none where `urls` is empty."""

    temperature: float = 0.0
    max_tokens: int = 2048
    keep_answers: bool = True  # in WORKDIR/user_messages.jsonl: the same conversation gets the same message again


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    baseline: Literal["segment_mean", "trajectory_mean", "leave_one_out"] = "segment_mean"
    scale: Literal["none", "std"] = "none"
    singleton: Literal["raw", "zero"] = "raw"
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"  # see docs/options.md; the others need old_logprobs = "sampler"
    clip_low: float = 0.2  # gspo: 3e-4 in its paper; cispo: 1 is no lower bound
    clip_high: float = 0.2  # gspo: 4e-4 in its paper; above clip_low it is DAPO's clip-higher (0.28 there)
    dual_clip: float = 3.0  # 0 turns it off; cispo has none
    kl_coef: float = 0.0
    denominator: Literal["tokens", "role"] = "tokens"  # of the whole batch, or of each role
    old_logprobs: Literal["trainer", "sampler"] = "trainer"  # whose the ratio divides by
    tis_cap: float = 0.0  # above 0: tokens weigh min(trainer's / sampler's probability, this); 2 is usual


@dataclasses.dataclass(frozen=True)
class FidelityConfig:
    """Rehearsals of reference results held out of the prompt, as further trajectories of a step (see fidelity.py)."""

    calls_per_step: int = 0  # held-out calls; 0 leaves it out
    attempts: int = 4  # rehearsals of each: the size of its group
    threshold: float = 1.0  # the share of a result's leaves from which on it counts as right; 1: equal as JSON
    weight: float = 1.0  # of their advantages beside the tasks'


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up; down to 0 at the last step
    warmup_steps: int = 0
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 1.0
    moments_dtype: Literal["float32", "bfloat16", "int8"] = "float32"  # as AdamW's moments are stored; see moments.py
    offload: bool = False  # they lie in the host's pinned memory between updates


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    layout: Literal["shared", "packed", "merged", "segment"] = "packed"  # see batching.py
    row_length: int = 20000  # tokens
    # The next two count for each shard of the batch (mesh.data x mesh.fsdp of them), so they suit every mesh.
    rows_multiple: int = 1  # the number of rows is padded to a multiple of this
    micro_batch_rows: int = 1  # rows whose activations are alive at once
    # Numbers of rows, of all shards together and rounded up to what the mesh takes, that batches are padded to while
    # they suffice: one compiled train step each. Empty micro-batches are skipped, so a few coarse ones do. () pads to a
    # list that grows with the rows, whose steps are compiled as they come.
    row_buckets: tuple[int, ...] = ()
    logprob_chunk: int = 1024  # tokens whose logits are alive at once
    drop_zero_advantage: bool = False  # spend nothing on sequences whose attempts were all rewarded alike


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    every: int = 0  # steps between evaluations; 0 evaluates before the first and after the last step only
    heldout_tasks: int = 0  # 0 leaves the evaluation out
    # Where they come from: tiny, BENCHMARK:PART or a file of executable tasks, of which the first are taken. "" takes
    # them out of data.source, which then does not train on them.
    source: str = ""
    samples: int = 4  # sampled attempts at each held-out task
    unseen_tasks: int = 0  # tasks of the domain that training never sees
    greedy: bool = True  # also one greedy attempt at each task
    fidelity_calls: int = 0  # rehearsed results compared with executed ones
    temperature: float = 0.6
    top_p: float = 0.95


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every: int = 10  # steps; the last step is saved always
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    tensorboard: bool = True
    tracker: Literal["", "wandb", "trackio"] = ""  # metrics go there too; each is an extra of the package
    trajectories_per_step: int = 2  # written out to trajectories.jsonl
    dump_every: int = 0  # steps; all of such a step goes to WORKDIR/rollouts (docs/replay.md). 0: of none, 1: of each


@dataclasses.dataclass(frozen=True)
class RunConfig:
    seed: int = 0
    steps: int = 1
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    prompts: PromptConfig = dataclasses.field(default_factory=PromptConfig)
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    external: ExternalConfig = dataclasses.field(default_factory=ExternalConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    user: UserConfig = dataclasses.field(default_factory=UserConfig)
    grpo: GrpoConfig = dataclasses.field(default_factory=GrpoConfig)
    fidelity: FidelityConfig = dataclasses.field(default_factory=FidelityConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    evaluation: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    # Compile everything before the first step instead of when it is first needed: no later step stalls, and one that
    # does not fit into memory ends the run at once. Results are the same.
    warm_up: bool = True
    compilation_cache: str = ""  # folder of compiled programs; "" is ~/.cache/envace_jax/xla, "off" keeps none


# How a model is reached and what is done about its faults, not what it says: a resumed run may change these.
FREE_OF_ENDPOINT = ("urls", "key_variable", "concurrency", "timeout_s", "retries")  # of a simulator, of a user
FREE_OF_REWARD = (*FREE_OF_ENDPOINT, "keep_verdicts", "most_masked")


def default_config_dict() -> config_dict.ConfigDict:
    """Every setting at its default, for a file in `configs/` to change. Assigning an unknown key is an error."""
    return to_config_dict(RunConfig())


def to_config_dict(value: Any) -> config_dict.ConfigDict:
    """A configuration, or a group of it, as a ConfigDict that flags may change."""
    result = config_dict.ConfigDict(allow_dotted_keys=False)
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        default = getattr(value, field.name)
        if dataclasses.is_dataclass(default):
            default = to_config_dict(default)
        elif default is None:  # a placeholder lets the command line know the type
            default = config_dict.placeholder(
                next(t for t in typing.get_args(hints[field.name]) if t is not type(None))
            )
        result[field.name] = default
    return result.lock()


def from_config_dict(config: config_dict.ConfigDict | Mapping[str, Any]) -> RunConfig:
    """Converts and checks a whole configuration; keys left out take their default.

    Raises ConfigError with one line for each unknown key (and the closest known ones), wrong type, or combination that
    cannot work.
    """
    values = config.to_dict() if isinstance(config, config_dict.ConfigDict) else config
    problems: list[str] = []
    result = _convert(RunConfig, values, "", problems)
    if problems:
        raise ConfigError("\n".join(problems))
    validate(result)
    return result


def to_json(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values (tuples become lists); `from_config_dict` reads it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def unknown_setting(key: str) -> str | None:
    """One line about a dotted key that no setting or group has, with the closest that exist; None for a known key."""
    known = [name for name, _ in _flatten(to_json(RunConfig()))]
    if key in known or any(name.startswith(f"{key}.") for name in known):
        return None
    return f"{key}: unknown setting; {_closest(key, known)}"


def unsettable(key: str) -> str | None:
    """One line about a dotted key that cannot be given a value, being unknown or a group; None for a setting."""
    inside = [name for name, _ in _flatten(to_json(RunConfig())) if name.startswith(f"{key}.")]
    if inside:
        return f"{key}: a group of settings, which has no value of its own; give one to {', '.join(inside)}"
    return unknown_setting(key)


def differing_keys(saved: Mapping[str, Any], current: RunConfig) -> list[str]:
    """Lines "key: saved value -> current value" for the settings that a resumed run must not change, in a fixed order.

    Free to change: the mesh (numbers then agree up to rounding), logging, evaluation, checkpoint, warm-up, the
    compilation cache, how a judge, an external model or a user is reached, and the number of steps unless the learning
    rate's schedule is stretched over them.
    """
    free = {"compilation_cache", "warm_up"} | {f"reward.{name}" for name in FREE_OF_REWARD}
    free |= {f"{group}.{name}" for group in ("external", "user") for name in FREE_OF_ENDPOINT}
    free |= {"steps"} if current.optimizer.schedule == "constant" else set()
    groups = ("mesh", "logging", "evaluation", "checkpoint")
    different = differing_settings(saved, to_json(current))
    return [line for key, line in different.items() if key not in free and key.split(".")[0] not in groups]


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, str]:
    """Lines "key: one's value -> the other's" by key, in a fixed order; both are as `to_json` gives them."""
    before, now = dict(_flatten(one)), dict(_flatten(other))
    pairs = {key: (before.get(key, "absent"), now.get(key, "absent")) for key in sorted(before.keys() | now.keys())}
    return {key: f"{key}: {old!r} -> {new!r}" for key, (old, new) in pairs.items() if old != new}


def local_path(path: str) -> Path:
    """A path in a setting as one that can be opened; a leading `~` is the home folder."""
    return Path(os.path.expanduser(path))


def model_path(path: str, setting: str = "model.path") -> str:
    """A folder or hub id to load from; "asset:NAME" becomes that folder in the package. Raises ConfigError."""
    if not path.startswith(ASSET_PREFIX):
        return str(local_path(path)) if path.startswith("~") else path
    folder = ASSETS / path.removeprefix(ASSET_PREFIX)
    if not folder.is_dir():
        known = sorted(entry.name for entry in ASSETS.iterdir() if entry.is_dir()) if ASSETS.is_dir() else []
        raise ConfigError(f"{setting} {path!r}: no such asset in {ASSETS}; it holds {', '.join(known) or 'none'}")
    return str(folder)


def validate(config: RunConfig) -> None:
    """Raises ConfigError with one line for each setting or combination of settings that cannot work."""
    problems = list(config_checks.problems(config))
    if problems:
        raise ConfigError("\n".join(problems))


def _convert(kind: type, values: Any, prefix: str, problems: list[str]) -> Any:
    """Builds `kind` from a mapping; what does not fit is added to `problems`, and then the result does not count."""
    if not isinstance(values, Mapping):
        problems.append(f"{prefix.rstrip('.')}: expected a group of settings, got {values!r}")
        return kind()
    hints = typing.get_type_hints(kind)
    arguments = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in hints:
            problems.append(unknown_setting(name) or f"{name}: unknown setting")
        elif dataclasses.is_dataclass(hints[key]):
            arguments[key] = _convert(typing.cast(type, hints[key]), value, f"{name}.", problems)
        else:
            arguments[key] = _cast(hints[key], value, name, problems)
    return kind(**arguments)


def _cast(hint: Any, value: Any, name: str, problems: list[str]) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if option is type(None):
            if value is None:
                return None
        elif typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            if isinstance(value, (tuple, list)) and all(type(entry) is item for entry in value):
                return tuple(value)
        elif option is float:
            if type(value) in (int, float) and math.isfinite(value):
                return float(value)
        elif type(value) is option:  # type(), since a bool is an int to isinstance
            return value
    problems.append(f"{name}: expected {_type_name(hint)}, got {value!r}")
    return value


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"a list of {typing.get_args(hint)[0].__name__}"
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(option or repr(option) for option in typing.get_args(hint))}"
    if hint is float:
        return "a finite number"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _closest(name: str, known: list[str]) -> str:
    """What an unknown setting may have meant: one alike in its group, or of the same name elsewhere; else the group."""
    group, _, last = name.rpartition(".")
    siblings = [key for key in known if key.rpartition(".")[0] == group]
    names = [key.rpartition(".")[2] for key in siblings]
    found = [siblings[names.index(close)] for close in difflib.get_close_matches(last, names, n=3, cutoff=0.6)]
    found += [key for key in known if key.rpartition(".")[2] == last]
    if group and not siblings:
        found = found or difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if found:
        return f"the closest known: {', '.join(found)}"
    return f"known there: {', '.join(siblings or [field.name for field in dataclasses.fields(RunConfig)])}"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
