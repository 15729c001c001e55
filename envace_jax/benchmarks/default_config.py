"""The settings of an evaluation where no --config names others: any Qwen3, Qwen2.5 or Llama-layout checkpoint.

Command:  python -m envace_jax.evaluate --benchmark=bfcl --model=FOLDER
Source:   lengths and sampling are the authors' for their evaluations of 8B.
Cost:     BFCL's categories that can be run here are 4,600 conversations.
"""

from ml_collections import config_dict

from envace_jax.config import default_config_dict


def get_config() -> config_dict.ConfigDict:
    config = default_config_dict()
    config.data.source = "tiny"  # no task is read from here
    config.data.count = 16
    config.model.param_dtype = "bfloat16"  # as checkpoints are; nothing is trained
    config.limits.parallel_calls = 100  # no benchmark has a limit of its own
    config.prompts.reference_examples = False  # nothing that only the evaluation knows
    return config
