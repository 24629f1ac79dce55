"""The configuration of a reward model's training, shown option by option on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RewardModelConfig:
    """What a reward model is made of. Defaults train the miniature's."""

    model: str = "seed:addition"
    """What it grows from: hub id, folder or `seed:NAME`; a language model gets a new head, a reward model goes on."""
    data: str = ""
    """Preferences: a .jsonl, .json or .parquet file, or a hub data set id."""
    task: str = ""
    """Instead of `data`: an embedded task that gives pairs."""
    split: str = "train"
    """For a hub data set: the split that is read."""
    prompt_column: str = "prompt"
    """The column with the prompt."""
    chosen_column: str = "chosen"
    """The column with the preferred answer."""
    rejected_column: str = "rejected"
    """The column with the other answer."""
    preference_column: str = ""
    """A column of numbers from 1 (the chosen column's answer is the better one) to 2 (the rejected column's is), as in
    AlpacaEval's annotations; 1.5, 0 and nothing are ties, which are left out. Empty = always the chosen column's."""
    ranked_column: str = ""
    """Instead of two columns: one with a list of answers, the best first."""
    task_pairs: int = 4000
    """For `task`: preferences to draw."""
    held_out: float = 0.1
    """Share of the prompts, by a hash of their text, that is left out of training and evaluated."""
    seed: int = 0
    """Keys the new head and the order of the prompts."""
    epochs: int = 1
    """Passes over the preferences (InstructGPT: 1, as more overfits)."""
    batch_prompts: int = 64
    """Prompts per optimizer step, each with all its pairs (InstructGPT: 64)."""
    micro_batch_size: int = 0
    """Most answers in one forward and backward pass, whole prompts at least; 0 = all. Changes no gradient."""
    lr: float = 9e-6
    """Peak learning rate of AdamW (InstructGPT: 9e-6)."""
    final_lr_share: float = 0.1
    """Share of the peak that a cosine leads down to (InstructGPT: 0.1); 1 = constant."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 = never."""
    max_length: int = 1024
    """Longest prompt and answer together, tokens; what is beyond is cut off."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in memory."""
    trust_remote_code: bool = False
    """Whether code shipped with a hub model may run here."""
