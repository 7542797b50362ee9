"""What other systems call a key that ductile has: TRL, verl, prime-rl, vLLM and Hugging Face's trainers.

They are suggested, never read: the same word may count something else (samples of a device, not of a step).
"""

from ductile.config.provenance import Path
from ductile.config.schema import find
from ductile.config.section import Section

FOREIGN: dict[str, tuple[str, ...]] = {
    # how far and how fast
    "learning_rate": ("trainer.optim.lr",),
    "max_grad_norm": ("trainer.optim.max_norm",),
    "grad_clip": ("trainer.optim.max_norm",),
    "clip_grad": ("trainer.optim.max_norm",),
    "adam_beta1": ("trainer.optim.betas1",),
    "adam_beta2": ("trainer.optim.betas2",),
    "adam_epsilon": ("trainer.optim.eps",),
    "lr_scheduler_type": ("trainer.scheduler.type",),
    "lr_scheduler": ("trainer.scheduler",),
    "lr_warmup_steps": ("trainer.scheduler.warmup_steps",),
    "warmup_ratio": ("trainer.scheduler.warmup_steps",),
    "num_train_epochs": ("max_steps",),
    "num_epochs": ("max_steps",),
    "total_epochs": ("max_steps",),
    "epochs": ("max_steps",),
    "total_training_steps": ("max_steps",),
    "num_steps": ("max_steps",),
    # how much at once
    "per_device_train_batch_size": ("orchestrator.batch_size", "data.batch_size"),
    "train_batch_size": ("orchestrator.batch_size", "data.batch_size"),
    "gradient_accumulation_steps": ("trainer.model.seq_len",),
    "micro_batch_size": ("trainer.model.seq_len",),
    "ppo_micro_batch_size_per_gpu": ("trainer.model.seq_len",),
    "ppo_max_token_len_per_gpu": ("trainer.model.seq_len",),
    "ppo_mini_batch_size": ("orchestrator.n_minibatches",),
    "steps_per_generation": ("orchestrator.n_minibatches",),
    "group": ("orchestrator.rollouts_per_example",),
    "group_size": ("orchestrator.rollouts_per_example",),
    "num_generations": ("orchestrator.rollouts_per_example",),
    "rollouts_per_prompt": ("orchestrator.rollouts_per_example",),
    "n": ("orchestrator.rollouts_per_example",),
    "async_level": ("orchestrator.max_async_level",),
    "max_off_policy_level": ("orchestrator.max_off_policy_steps",),
    # lengths
    "max_completion_length": ("orchestrator.sampling.max_tokens",),
    "max_response_length": ("orchestrator.sampling.max_tokens",),
    "max_new_tokens": ("orchestrator.sampling.max_tokens",),
    "max_prompt_length": ("seq_len", "model.max_model_len"),
    "max_seq_length": ("seq_len", "data.seq_len", "model.max_model_len"),
    "max_seq_len": ("seq_len", "data.seq_len", "model.max_model_len"),
    "max_length": ("seq_len", "data.seq_len", "model.max_model_len"),
    "max_model_len": ("inference.model.max_model_len",),
    # model and data
    "model_name_or_path": ("model.name",),
    "model_name": ("model.name",),
    "model_path": ("model.name",),
    "served_model_name": ("inference.server.served_model_name",),
    "torch_dtype": ("trainer.model.compute_dtype", "model.dtype"),
    "bf16": ("trainer.model.compute_dtype", "model.dtype"),
    "gradient_checkpointing": ("trainer.model.ac",),
    "enable_gradient_checkpointing": ("trainer.model.ac",),
    "file": ("orchestrator.task.path", "data.path"),
    "train_file": ("orchestrator.task.path", "data.path"),
    "train_files": ("orchestrator.task.path", "data.path"),
    "val_files": ("orchestrator.eval.task.path",),
    "dataset": ("orchestrator.task.path", "data.path"),
    "dataset_name": ("orchestrator.task.path", "data.path"),
    "env": ("orchestrator.task",),
    "environment": ("orchestrator.task",),
    "reward_funcs": ("orchestrator.task.reward",),
    "reward_func": ("orchestrator.task.reward",),
    "reward_function": ("orchestrator.task.reward",),
    "reward_fn": ("orchestrator.task.reward",),
    # losses and advantages
    "loss_type": ("trainer.loss.type",),
    "beta": ("trainer.loss.kl_coef",),
    "kl_loss_coef": ("trainer.loss.kl_coef",),
    "epsilon": ("trainer.loss.clip_low",),
    "epsilon_high": ("trainer.loss.clip_high",),
    "clip_ratio": ("trainer.loss.clip_low",),
    "clip_ratio_low": ("trainer.loss.clip_low",),
    "clip_ratio_high": ("trainer.loss.clip_high",),
    "adv_estimator": ("orchestrator.advantage.type",),
    "scale_rewards": ("orchestrator.advantage.type",),
    # evaluation, checkpoints, reports
    "eval_steps": ("orchestrator.eval.interval",),
    "test_freq": ("orchestrator.eval.interval",),
    "save_steps": ("ckpt.interval",),
    "save_freq": ("ckpt.interval",),
    "save_total_limit": ("ckpt.keep_last",),
    "keep": ("ckpt.keep_last",),
    "resume_from_checkpoint": ("resume",),
    "default_local_dir": ("output_dir",),
    "report_to": ("wandb",),
    "run_name": ("wandb.name",),
    "experiment_name": ("wandb.name",),
    "project_name": ("wandb.project",),
    # devices and engines
    "n_gpus_per_node": ("deployment.gpus_per_node",),
    "num_gpus": ("deployment.num_train_gpus",),
    "nnodes": ("cluster.num_nodes",),
    "tensor_parallel_size": ("inference.parallel.tp",),
    "tensor_model_parallel_size": ("inference.parallel.tp",),
    "data_parallel_size": ("inference.parallel.dp",),
    "gpu_memory_utilization": ("inference.gpu_memory_utilization",),
    "vllm_gpu_memory_utilization": ("inference.gpu_memory_utilization",),
    "chat_template_kwargs": ("orchestrator.chat_template_kwargs", "data.chat_template_kwargs"),
    "apply_chat_template_kwargs": ("orchestrator.chat_template_kwargs", "data.chat_template_kwargs"),
    "stop_token_ids": ("orchestrator.sampling.stop_token_ids",),
    "use_vllm": ("inference.engine",),
}
"""Last word of another system's key -> our keys, as `ductile rl` or the other commands have them; the first one that
the command has is meant."""


def ours(root: type[Section], path: Path) -> Path | None:
    """The key of this command that another system calls `path`."""
    for key in FOREIGN.get(str(path[-1]), ()):
        whole = tuple(key.split("."))
        for candidate in (whole, whole[1:]):  # `trainer.optim.lr` of rl is `optim.lr` of sft and of trainer
            if candidate and candidate != path and find(root, candidate):
                return candidate
    return None
