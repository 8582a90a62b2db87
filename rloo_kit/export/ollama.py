"""The Modelfile, from which ``ollama create`` imports a GGUF file."""

from rloo_kit.config.run_file import RunConfig
from rloo_kit.config.settings import DEFAULTS
from rloo_kit.job import system_message
from rloo_kit.text.chat_templates import end_of_turn_id
from rloo_kit.types import Tokenizer


def modelfile(file: str, tokenizer: Tokenizer, config: RunConfig) -> str:
    """Return the text of a Modelfile with the run's temperature and system message.

    Other sampling settings of the run are not used: top-k, top-p and the repeat penalty are off.
    The Modelfile has no TEMPLATE line, since Ollama recognises common chat templates and has its
    own version of each.

    Args:
        file: Name of the GGUF file, which is in the same folder as the Modelfile.
        tokenizer: The model's tokenizer.
        config: Settings of the run that trained the model.
    """
    temperature = config.trainer.get("temperature", DEFAULTS["temperature"])
    lines = [
        f"FROM ./{file}",
        f"PARAMETER temperature {temperature:g}",
        "PARAMETER top_k 0",
        "PARAMETER top_p 1",
        "PARAMETER repeat_penalty 1",
    ]
    end = end_of_turn_id(tokenizer)
    if end is not None and end != tokenizer.eos_token_id:  # llama.cpp stops at the EOS token anyway
        lines.append(f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(end)}"')
    if system := system_message(config.data):
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n"
