"""What `hub.export` writes beside weights and tokenizer: a model card, and code of three lines."""

import dataclasses

from cheems_ref.config import ModelConfig

# The file that trust_remote_code=True runs, by its name without .py, and what is taken from it.
REMOTE = "modeling_cheems_ref"
AUTO_MAP = {
    "AutoConfig": f"{REMOTE}.CheemsConfig",
    "AutoModel": f"{REMOTE}.CheemsModel",
    "AutoModelForCausalLM": f"{REMOTE}.CheemsForCausalLM",
}
CODE = '''"""What trust_remote_code=True runs: the classes are those of the package cheems_ref."""

from cheems_ref.hub import CheemsConfig, CheemsForCausalLM, CheemsModel

__all__ = ["CheemsConfig", "CheemsForCausalLM", "CheemsModel"]
'''
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [cheems_ref]
---

# A Cheems model

Written by `cheems_ref.hub.export`. What text the model was trained on, and how well it writes, is
not recorded here.

| | |
|---|---|
| pattern | `{pattern}` |
{sizes}
| parameters | {parameters:,}, in {dtype} |
| ids | the bytes of a text |

`cheems_ref/config.py` explains the letters and the fields; those that are not listed have its
defaults. To load the model:

    pip install "cheems-ref[hub]"

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this one
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100)[0]))
```

`trust_remote_code=True` runs `{remote}.py`, which imports `cheems_ref.hub` and does nothing else.
After `import cheems_ref.hub` it is not needed.
"""


def model_card(config: ModelConfig, parameters: int, dtype: str) -> str:
    """Return the model card: only what the configuration says, and how to load the model.

    Args:
        config: of its fields those are listed that differ from their defaults, and the width.
        parameters: how many the model has.
        dtype: of them, such as "float32".
    """
    defaults = {f.name: f.default for f in dataclasses.fields(config) if f.name != "pattern"}
    chosen = [name for name, default in defaults.items() if getattr(config, name) != default]
    rows = [f"| {name} | {getattr(config, name)} |" for name in dict.fromkeys(["d_model", *chosen])]
    return CARD.format(
        pattern=config.pattern,
        sizes="\n".join(rows),
        parameters=parameters,
        dtype=dtype,
        remote=REMOTE,
    )
