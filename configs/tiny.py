"""The tiny world, end to end, on a CPU.

Command:  python -m envace_jax.main --config=configs/tiny.py
Source:   ours; the world, its tasks and the base model are made by this repository (experiments/make_tiny_base.py).
Cost:     about 4 minutes on 2 cores; each run says its own in summary.json.
"""

from ml_collections import config_dict

from envace_jax.config import default_config_dict


def get_config() -> config_dict.ConfigDict:
    config = default_config_dict()
    config.steps = 75
    config.model.path = "asset:tiny_base"
    config.model.compute_dtype = "float32"  # CPUs have no fast bfloat16
    config.model.remat = "none"  # the activations are small

    config.data.source = "tiny"
    config.data.count = 2000
    config.data.tasks_per_step = 16  # the authors' 16 x 4
    config.data.attempts = 4

    config.prompts.style = "compact"  # the base was taught this form: every token costs a tiny model dearly
    config.prompts.thinking = False
    config.prompts.max_act_prompt = 160
    config.prompts.max_rehearse_prompt = 400

    config.limits.act_context = 440  # tokens; right conversations stay below it
    config.limits.act_response = 44  # tokens; two calls side by side fit
    config.limits.rehearse_response = 40

    config.sampler.slots = 32  # half as many as trajectories: about as many as wait for a token at a time
    config.sampler.cache_rows = 128  # both streams of every trajectory
    config.sampler.max_length = 440
    config.sampler.refill_share = 0.4  # segments are short: look up less often than the default
    config.sampler.prefill_lengths = (16, 32, 64, 128, 192, 256, 440)
    config.sampler.prefill_rows = (1, 4)
    config.sampler.cache_lengths = (440,)
    config.sampler.cache_dtype = "float32"

    config.optimizer.learning_rate = 3e-4  # 0.9 M parameters bear more than the authors' 1e-6 for 8 B
    config.optimizer.schedule = "cosine"  # the last, small steps average out what the first ones overdo

    config.batch.layout = "shared"
    config.batch.row_length = 640
    config.batch.rows_multiple = 4
    config.batch.row_buckets = (128,)  # a step fills about 50; empty ones are free
    config.batch.micro_batch_rows = 4
    config.batch.logprob_chunk = 512
    config.batch.drop_zero_advantage = True  # exact without a KL term; the more tasks are solved, the more it saves

    config.evaluation.heldout_tasks = 256
    config.evaluation.unseen_tasks = 64
    config.evaluation.fidelity_calls = 256
    config.evaluation.temperature = 1.0  # as in training: the figure that training moves
    config.evaluation.top_p = 1.0

    config.checkpoint.every = 20
    return config
