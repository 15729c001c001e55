"""Qwen3-0.6B by world rehearsal on one chip with 16 GB, in the generated world: what experiments/colab_tpu.ipynb runs.

Command:  python -m envace_jax.main --config=configs/qwen3_0p6b_colab.py
Source:   configs/qwen3_0p6b.py with a context of 4,096 tokens instead of 16,000: lines marked "ours" are what the
          authors leave open, "shorter" what is theirs at another length. The tasks are those of configs/tiny.py.
Cost:     not measured; docs/tpu.md has what was planned for one v5e chip.
Planned:  v5e:1x1  as it stands
"""

from ml_collections import config_dict

from envace_jax.config import default_config_dict


def get_config() -> config_dict.ConfigDict:
    config = default_config_dict()
    config.steps = 100  # ours: a session on a free chip ends within hours; the checkpoints carry a run over several

    config.model.path = "Qwen/Qwen3-0.6B"  # sizes come from its config.json
    config.model.compute_dtype = "bfloat16"  # ours
    config.model.param_dtype = "float32"  # ours: at this learning rate a bfloat16 parameter would not move
    config.model.remat = "full"  # ours

    config.data.source = "tiny"  # ours: nothing to download, and executable, so that success can be measured
    config.data.count = 2000  # ours
    config.data.tasks_per_step = 16  # authors
    config.data.attempts = 4  # authors

    config.prompts.style = "full"
    config.prompts.thinking = True  # authors
    config.prompts.reference_examples = True  # authors: all reference calls of the task
    config.prompts.max_act_prompt = 3072  # shorter; this world's first prompts have about 280 tokens
    config.prompts.max_rehearse_prompt = 3072  # shorter; this world's have at most about 1,000

    config.limits.assistant_turns = 30  # authors
    config.limits.user_turns = 30  # authors
    config.limits.parallel_calls = 20  # authors
    config.limits.generations = 200  # authors
    config.limits.act_context = 4096  # shorter
    config.limits.act_response = 1024  # shorter
    config.limits.rehearse_response = 1024  # shorter

    config.sampler.slots = 16  # ours, as planned; trajectories take turns
    config.sampler.pages = 640  # ours, as planned: of 64 tokens, 40,960 tokens in all
    config.sampler.temperature = 1.0  # authors
    config.sampler.top_p = 1.0  # authors
    config.sampler.max_length = 4096  # shorter: the context
    config.sampler.prefill_lengths = (128, 512, 1024)  # ours: a longer prompt goes in pieces
    config.sampler.prefill_rows = (1, 4)  # ours
    config.sampler.cache_lengths = (4096,)  # with pages there is one length

    config.rollout.responder = "rehearsed"  # the method

    config.grpo.baseline = "segment_mean"  # authors
    config.grpo.scale = "none"  # authors: no division by the standard deviation
    config.grpo.singleton = "raw"  # authors: a group of one segment keeps its reward
    config.grpo.clip_low = 0.2  # authors
    config.grpo.clip_high = 0.2  # authors
    config.grpo.dual_clip = 3.0  # authors
    config.grpo.kl_coef = 0.0  # authors: off (1e-4 when on)
    config.grpo.denominator = "tokens"  # authors: token mean over the batch

    config.optimizer.learning_rate = 1e-6  # authors
    config.optimizer.schedule = "constant"  # authors
    config.optimizer.weight_decay = 0.01  # authors
    config.optimizer.clip_norm = 1.0  # authors

    config.batch.layout = "packed"  # ours; the objective is the authors' one row per segment
    config.batch.row_length = 4096  # the longest sequence there can be
    config.batch.rows_multiple = 1  # ours
    config.batch.micro_batch_rows = 1  # ours: one row at a time
    config.batch.row_buckets = (256,)  # ours: one compiled step for most batches; empty rows are skipped
    config.batch.logprob_chunk = 1024  # ours
    config.batch.drop_zero_advantage = True  # ours: exact without a KL term, and saves work

    config.evaluation.every = 25  # ours
    config.evaluation.heldout_tasks = 32  # ours
    config.evaluation.samples = 2  # ours
    config.evaluation.greedy = False  # ours: half the cost
    config.evaluation.unseen_tasks = 16  # ours
    config.evaluation.fidelity_calls = 64  # ours
    config.evaluation.temperature = 0.6  # authors' validation
    config.evaluation.top_p = 0.95  # authors' validation

    config.checkpoint.every = 10  # ours
    config.checkpoint.keep = 1  # ours: one has 7.2 GB (parameters and two moments in float32)
    return config
