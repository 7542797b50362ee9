"""[orchestrator]: which prompts, how many completions of each, how far generation may run ahead of training."""

from typing import Annotated, Literal

import msgspec
from pydantic import Field

from ductile.config.schema.section import FilePath, ImportPath, NotBuilt, Section
from ductile.core.rollouts.staleness import OnStale
from ductile.sampling import Sampling


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """-1 and 0 keep all tokens."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_tokens: int = Field(default=128, ge=1)
    seed: int | None = None
    stop: list[str] = []
    """Texts that end a completion; they stay part of it. Special tokens may be written: "<|im_end|>"."""
    stop_token_ids: list[int] = []
    """Tokens that end a completion, besides the model's own and the chat template's end of turn."""
    ignore_eos: bool = False
    """Always generate `max_tokens`; for benchmarks."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text that rewards and a task's `reply` get. Otherwise only the token that ended
    the turn is left out. `samples.jsonl` has all that was sampled."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the turn in that text, as a reward for a closed tag needs it with `stop`
    ["</answer>"]."""


class ReasoningGymTask(Section):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """A data set of reasoning-gym: "chain_sum", "basic_arithmetic", "countdown", ..."""
    config: dict[str, object] = {}
    """Its own configuration, as reasoning-gym names it."""
    size: int = Field(default=10_000, ge=1)
    """Examples to make."""
    seed: int = 0
    system_prompt: str | None = None
    question_template: str = "{question}"
    """The prompt that is made of an example; `{question}` stands for reasoning-gym's text."""


class JsonlTask(Section):
    type: Literal["jsonl"] = "jsonl"
    path: FilePath
    """The path of a file with one JSON object a line: `prompt` (text) or `messages`, and whatever the reward needs."""
    reward: ImportPath | list[ImportPath]
    """`package.module.function` or `file.py:function`, called as `reward(row, completion) -> float | (float, metrics)`,
    or with lists, as TRL does, when it asks for `completions`. Of several functions the rewards are added up."""
    reward_weights: list[float] | None = None
    """What each of several functions' rewards is multiplied by; default: 1."""
    system_prompt: str | None = None


class ImportTask(Section):
    type: Literal["import"] = "import"
    import_path: ImportPath
    """`package.module.Class` or `file.py:Class` that follows `ductile.roles.Task`; called with `kwargs`."""
    kwargs: dict[str, object] = {}


class BuiltinTask(Section):
    type: Literal["builtin"] = "builtin"
    name: str
    """A procedural task of `ductile.tasks`: "addition", "reverse", "guess_number" (several turns)."""
    config: dict[str, object] = {}
    size: int = Field(default=10_000, ge=1)
    seed: int = 0


TaskConfig = Annotated[ReasoningGymTask | JsonlTask | ImportTask | BuiltinTask, Field(discriminator="type")]


class EvalConfig(Section):
    interval: int | None = Field(default=None, ge=1)
    """Evaluate every n steps; the first weights and the last are always evaluated when a task is given."""
    task: TaskConfig | None = None
    """Held-out prompts. Default: the last `num_examples` of the training task, which are then never trained on."""
    num_examples: int = Field(default=64, ge=1)
    samples_per_example: int = Field(default=1, ge=1)
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    """Sampling of the evaluation, greedy by default. `max_tokens`, `stop`, `stop_token_ids`, `skip_special_tokens` and
    `include_stop_str_in_output` are those of `orchestrator.sampling` where they are absent."""
    enabled: bool = True


def to_sampling(config: SamplingConfig) -> Sampling:
    """The section as the sampling that requests carry to a generator."""
    return msgspec.convert(config.model_dump() | {"top_k": config.top_k or -1}, Sampling)  # 0 means all, too


class AdvantageConfig(Section):
    type: Literal["default", "grpo", "custom"] = "default"
    """default: reward minus the group's mean; grpo: also divided by the group's standard deviation."""
    import_path: ImportPath | None = None
    """Import path of the function that `custom` calls as `function(rewards: list[float], group: RolloutGroup) ->
    list[float]`."""


class GradersConfig(Section):
    """The processes that run reward functions: how many, and what each may use, with whatever it starts."""

    num_workers: int | None = Field(default=None, ge=1)
    """Processes, started as they are needed; default: half of the cores, at most 8."""
    timeout_s: float = Field(default=30.0, gt=0)
    """A reward function that takes longer has failed: its rollout has no reward, and is counted in `reward_errors`."""
    max_error_share: float = Field(default=0.5, ge=0, le=1)
    """The run ends when more than this share of a step's or of an evaluation's rewards failed. 1: never."""
    env: list[str] = []
    """Names of environment variables that rewards see. Without that they see PATH, HOME, the locale and the like, and
    no keys or tokens."""
    network: bool = False
    """Rewards may use the network, as a judge behind an API needs it."""
    max_memory_gib: float | None = Field(default=32.0, ge=0.5)
    """Address space of each process."""
    max_processes: int | None = Field(default=1024, ge=8)
    """Processes and threads that rewards may add to those that the user has. The kernel does not count root's."""
    max_file_gib: float | None = Field(default=4.0, gt=0)
    """The longest file that a reward may write."""


class ClientConfig(Section):
    base_url: str | list[str] | None = None
    """A server, `http://host:port/v1`. `ductile orchestrator` asks it alone, and it may be any OpenAI-compatible one;
    in `ductile rl` it is one of ours (`ductile inference`), or a list of them: they generate beside the run's generate
    slots, or instead of them, and get each version of the weights (docs/fleet.md)."""
    api_key: str | None = None
    """Key of the servers: the same for all."""
    api_key_var: str | None = None
    """The environment variable that holds the key: what is typed as `api_key` others on the machine can see."""
    timeout_s: float = Field(default=600.0, gt=0)

    @property
    def urls(self) -> tuple[str, ...]:
        """`base_url` as it is written, one or several."""
        if self.base_url is None:
            return ()
        return (self.base_url,) if isinstance(self.base_url, str) else tuple(self.base_url)


class OrchestratorConfig(Section):
    task: TaskConfig | None = None
    batch_size: int = Field(default=128, ge=1)
    """Rollouts a training step uses. Must be a multiple of `rollouts_per_example`."""
    rollouts_per_example: int = Field(default=8, ge=1)
    """Completions of one prompt (the group). Also written `group_size`."""
    n_minibatches: int = Field(default=1, ge=1)
    """Optimizer steps a batch is split into."""
    max_async_level: int = Field(default=1, ge=0)
    """How many versions generation may run ahead of the trainer. 0: strictly on-policy."""
    max_off_policy_steps: int = Field(default=8, ge=0)
    """The most versions that a group's oldest token may be behind the weights that it trains."""
    on_stale: OnStale = "drop"
    """Fate of completions that take longer than `max_off_policy_steps`. drop: their group is thrown away, and
    asked again, so long ones are learned from less often; wait: the trainer takes the oldest groups first, and waits
    for those that would become too old."""
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    drop_zero_advantage: bool = True
    """Leave groups without any advantage out of the gradient (they still count for the batch). With `default` and
    `grpo` these are the groups whose rewards are all equal. None is left out where a loss needs the reference model."""
    seed: int = 0
    shuffle: bool = True
    canaries: int = Field(default=2, ge=0)
    """Prompts of which each generator samples a few tokens of every version, to compare with the trainer. 0: none."""
    num_samples_kept: int = Field(default=8, ge=0)
    """Rollouts of each step that `samples.jsonl` keeps, with their rewards, for people to read."""
    graders: GradersConfig = GradersConfig()
    client: ClientConfig = ClientConfig()
    max_steps: int | None = Field(default=None, ge=1)
    oversampling_factor: Annotated[float, NotBuilt("oversampling")] = 1.0
