"""What the tests of commands evaluate and calibrate on, and the shape of their models."""

ROWS = [f"{n} bottles hang on the wall; take one away.\n" for n in range(8)]
TEXT = "\n\n".join(ROWS)
SHAPE = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
