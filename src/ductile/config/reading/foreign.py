"""What other systems call a key that ductile has: TRL, verl, prime-rl, vLLM and Hugging Face's trainers.

They are suggested, never read: the same word may count something else (samples of a device, not of a step).
"""

from ductile.config.reading.key_tree import find
from ductile.config.reading.provenance import Path
from ductile.config.schema.section import Section

_OTHERS: dict[tuple[str, ...], tuple[str, ...]] = {
    # how far and how fast
    ("trainer.optim.lr",): ("learning_rate",),
    ("trainer.optim.max_norm",): ("max_grad_norm", "grad_clip", "clip_grad"),
    ("trainer.optim.betas1",): ("adam_beta1",),
    ("trainer.optim.betas2",): ("adam_beta2",),
    ("trainer.optim.eps",): ("adam_epsilon",),
    ("trainer.scheduler.type",): ("lr_scheduler_type",),
    ("trainer.scheduler",): ("lr_scheduler",),
    ("trainer.scheduler.warmup_steps",): ("lr_warmup_steps", "warmup_ratio"),
    ("max_steps",): ("num_train_epochs", "num_epochs", "total_epochs", "epochs", "total_training_steps", "num_steps"),
    # how much at once
    ("orchestrator.batch_size", "data.batch_size"): ("per_device_train_batch_size", "train_batch_size"),
    ("trainer.model.seq_len",): (
        "gradient_accumulation_steps",
        "micro_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ppo_max_token_len_per_gpu",
    ),
    ("orchestrator.n_minibatches",): ("ppo_mini_batch_size", "steps_per_generation"),
    ("orchestrator.rollouts_per_example",): ("group", "group_size", "num_generations", "rollouts_per_prompt", "n"),
    ("orchestrator.max_async_level",): ("async_level",),
    ("orchestrator.max_off_policy_steps",): ("max_off_policy_level",),
    # lengths
    ("orchestrator.sampling.max_tokens",): ("max_completion_length", "max_response_length", "max_new_tokens"),
    ("seq_len", "model.max_model_len"): ("max_prompt_length",),
    ("seq_len", "data.seq_len", "model.max_model_len"): ("max_seq_length", "max_seq_len", "max_length"),
    ("inference.model.max_model_len",): ("max_model_len",),
    # model and data
    ("model.name",): ("model_name_or_path", "model_name", "model_path"),
    ("inference.server.served_model_name",): ("served_model_name",),
    ("trainer.model.compute_dtype", "model.dtype"): ("torch_dtype", "bf16"),
    ("trainer.model.ac",): ("gradient_checkpointing", "enable_gradient_checkpointing"),
    ("orchestrator.task.path", "data.path"): ("file", "train_file", "train_files", "dataset", "dataset_name"),
    ("orchestrator.eval.task.path",): ("val_files",),
    ("orchestrator.task",): ("env", "environment"),
    ("orchestrator.task.reward",): ("reward_funcs", "reward_func", "reward_function", "reward_fn"),
    # losses and advantages
    ("trainer.loss.type",): ("loss_type",),
    ("trainer.loss.kl_coef",): ("beta", "kl_loss_coef"),
    ("trainer.loss.clip_low",): ("epsilon", "clip_ratio", "clip_ratio_low"),
    ("trainer.loss.clip_high",): ("epsilon_high", "clip_ratio_high"),
    ("orchestrator.advantage.type",): ("adv_estimator", "scale_rewards"),
    # evaluation, checkpoints, reports
    ("orchestrator.eval.interval",): ("eval_steps", "test_freq"),
    ("ckpt.interval",): ("save_steps", "save_freq"),
    ("ckpt.keep_last",): ("save_total_limit", "keep"),
    ("resume",): ("resume_from_checkpoint",),
    ("output_dir",): ("default_local_dir",),
    ("wandb",): ("report_to",),
    ("wandb.name",): ("run_name", "experiment_name"),
    ("wandb.project",): ("project_name",),
    # devices, meshes and engines
    ("trainer.model.pp",): ("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree"),
    ("trainer.model.pp_schedule",): ("pipeline_parallel_schedule",),
    ("trainer.model.vpp",): ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
    ("trainer.model.cp",): ("context_parallel_size", "context_parallel_degree", "ulysses_sequence_parallel_size"),
    ("trainer.model.tp",): ("tensor_parallel_degree",),
    ("trainer.resize.layouts",): ("trainer_parallel_strategies", "valid_dp_sizes"),
    ("deployment.gpus_per_node",): ("n_gpus_per_node",),
    ("deployment.num_train_gpus",): ("num_gpus",),
    ("cluster.num_nodes",): ("nnodes",),
    ("inference.parallel.tp",): ("tensor_parallel_size", "tensor_model_parallel_size"),
    ("inference.parallel.dp",): ("data_parallel_size",),
    ("scorer.tp",): ("ref.megatron.tensor_model_parallel_size",),
    ("inference.gpu_memory_utilization",): ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    ("model.chat_template",): ("chat_template", "chat_template_path", "custom_chat_template"),
    ("model.chat_template_kwargs",): (
        "chat_template_kwargs",
        "apply_chat_template_kwargs",
        "default_chat_template_kwargs",
    ),
    ("orchestrator.sampling.stop_token_ids",): ("stop_token_ids",),
    ("inference.engine",): ("use_vllm",),
}
"""Our keys, as `ductile rl` or the other commands have them, and the last word of other systems' keys for them, or
several where one may mean another key; the first of ours that the command has is meant."""
FOREIGN = {word: keys for keys, words in _OTHERS.items() for word in words}


def ours(root: type[Section], path: Path) -> Path | None:
    """The key of this command that another system calls `path`."""
    ends = (".".join(map(str, path[start:])) for start in range(len(path)))
    for key in next((FOREIGN[end] for end in ends if end in FOREIGN), ()):
        whole = tuple(key.split("."))
        for candidate in (whole, whole[1:]):  # `trainer.optim.lr` of rl is `optim.lr` of sft and of trainer
            if candidate and candidate != path and find(root, candidate):
                return candidate
    return None
