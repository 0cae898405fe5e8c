"""How the bundled demo model is made: drawn scenes, questions on them, a tokenizer and a CPU trainer."""
