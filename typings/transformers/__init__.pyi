"""The names that Paceline imports from transformers, for pyright.

The root of the real package names about a thousand modules. Reading it takes half of a type check.
"""

from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM as AutoModelForSeq2SeqLM
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.t5.configuration_t5 import T5Config as T5Config
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)

__version__: str
