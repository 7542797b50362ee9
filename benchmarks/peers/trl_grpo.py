"""One TRL GRPO run, timed step by step. Started by `benchmarks/grpo_step.py` under torch.distributed.run.

Prints one JSON line from rank 0: seconds of every optimizer step after the warm-up, taken at the callback that TRL
fires when a step has ended, so generation, reward, loss and update are all inside.
"""

import argparse
import itertools
import json
import os
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON list of prompt strings")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="completions a step, all processes together")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", required=True)
    args = parser.parse_args()

    import torch

    torch.set_num_threads(args.threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    with open(args.prompts) as file:
        prompts: list[str] = json.load(file)
    processes = int(os.environ.get("WORLD_SIZE", "1"))

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks = [time.perf_counter()]

        def on_step_end(self, *_: object, **__: object) -> None:
            self.marks.append(time.perf_counter())

    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=[lambda completions, **_: [float(len(set(text)) % 7) for text in completions]],
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=args.output,
            per_device_train_batch_size=args.batch // processes,
            gradient_accumulation_steps=1,
            num_generations=args.group,
            max_completion_length=args.tokens,
            generation_kwargs={"min_new_tokens": args.tokens},
            max_steps=args.steps + args.warmup,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            beta=0.0,
            bf16=False,
            fp16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            dataloader_num_workers=0,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        marks = clock.marks
        seconds = [after - before for before, after in itertools.pairwise(marks)]
        print(
            json.dumps({"step_s": seconds[args.warmup :], "processes": processes, "threads": args.threads}), flush=True
        )


if __name__ == "__main__":
    main()
